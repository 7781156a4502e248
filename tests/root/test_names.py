"""Names in records of a root: none of them leads out of its folder, in any record of the catalogue."""

import json
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

from ludic.errors import SchemaError
from ludic.root.catalogue import FILE_KINDS, Records
from ludic.root.json_records import CodeRecord, Manifest, RelativeName, convert, encode_json
from ludic.root.root import Root
from ludic.root.weights.weight_folders import MANIFEST, read_identity, read_manifest

RECORDS = sorted(
    {row.record for row in FILE_KINDS if isinstance(row, Records)} | {CodeRecord, Manifest},
    key=lambda record: record.__name__,
)
HOSTILE = (
    "",
    ".",
    "..",
    "../x",
    "a/../../x",
    "a/..",
    "a/./x",
    "a//x",
    "a/",
    "/etc/passwd",
    "a\\x",
    "a\0",
    "C:x",
    "C:/x",
)
CHECKED = {"extra_columns": {"x_judge": "string"}}
"""Sound values of fields that a record checks by more than their types."""
FITTING = ("w0-test", "a" * 64, "a" * 16, "/here/cats.py", "cats.py")
TEXTS = {
    "Attempt.owner": "for people",
    "Attempt.created_at": "for people",
    "Attempt.config": "settings, which are checked as such",
    "Attempt.numerics": "compared, and for people",
    "Attempt.code": "each decoded as a CodeRecord",
    "Attempt.claim_id": "compared",
    "CheckpointInfo.cursor": "numbers, and texts that are compared with those of rows",
    "CheckpointInfo.config": "settings, which are checked as such",
    "CheckpointInfo.run_id": "compared",
    "CodeList.owner": "for people",
    "CodeList.created_at": "for people",
    "CodeRecord.role": "compared",
    "CodeRecord.name": "compared, and for people",
    "CodeRecord.path": "for people; a text is read by its digest, and ends with .py or .sql",
    "CodeRecord.package": "for people",
    "CodeRecord.imports key": "compared",
    "CodeRecord.imports": "a digest that is compared",
    "Delta.files": "a digest that is compared",
    "EpisodeClaim.left_behind": "compared",
    "EpisodeClaim.scored_call_id": "compared",
    "EpisodeClaim.opened_at": "for people",
    "EpisodeClaim.expires_at": "compared",
    "EpisodeClaim.group_id": "compared",
    "EpisodeClaim.env_name": "part of a path only quoted",
    "EpisodeClaim.env_example_id": "compared",
    "EpisodeClaim.facts": "values of rows, which are checked as such",
    "EpisodeClaim.sealed_at": "for people",
    "EpisodeClaim.error": "for people",
    "EpisodeClaim.reward_components key": "for people",
    "EpisodeClaim.scored_at": "for people",
    "EpisodeClaim.agent": "for people",
    "EvaluationRecord.env_name": "part of a path only quoted",
    "EvaluationRecord.settings": "compared",
    "EvaluationRecord.code": "each decoded as a CodeRecord",
    "EvaluationRecord.created_at": "for people",
    "Evaluator.owner": "for people",
    "Evaluator.process": "compared",
    "GatewayLife.owner": "for people",
    "GatewayLife.address": "shown to clients",
    "GatewayLife.created_at": "for people",
    "GatewayLife.process": "compared",
    "GatewayLife.ended_at": "for people",
    "ImportBegun.format": "compared",
    "ImportBegun.env_name": "compared",
    "ImportBegun.tokenizer": "compared",
    "ImportBegun.file": "compared",
    "ImportBegun.created_at": "for people",
    "ImportBegun.code_sha256": "compared",
    "ImportBegun.modified": "compared",
    "ImportReport.file": "for people",
    "ImportReport.form": "for people",
    "ImportReport.kept_as_metadata key": "for people",
    "ImportReport.not_kept key": "for people",
    "ImportReport.refused.reason": "for people",
    "ImportReport.tokenizer": "for people",
    "LatestPolicy.run_id": "compared",
    "Lease.error": "for people",
    "Lease.claim_id": "compared",
    "Lease.owner": "for people",
    "Lease.since": "for people",
    "Lease.process": "compared",
    "Manifest.files": "a digest that is compared",
    "ModelIdentity.source": "a setting as it was typed: a model to look for",
    "ModelIdentity.folder": "a folder to look for the model in, which must have the same fingerprints",
    "ModelIdentity.revision": "a commit of the Hub, which must have the same fingerprints",
    "ModelIdentity.config": "a digest that is compared",
    "ModelIdentity.tokenizer": "a digest that is compared",
    "ModelIdentity.weights": "a digest that is compared",
    "CutRecord.weights_sha256": "a digest that is compared",
    "Policy.created_at": "for people",
    "QuarantinedFile.reason": "for people",
    "QuarantinedFile.found_at": "for people",
    "RunRecord.schema_version": "compared",
    "RunRecord.model": "a setting as it was typed: a model to look for",
    "RunRecord.env": "settings, which are checked as such",
    "RunRecord.env_options": "settings; a file of inputs/ that one names must be of a row of the catalogue",
    "RunRecord.extra_columns key": "a column: x_ and then letters, digits and _",
    "RunRecord.extra_columns": "compared",
    "SlotClaim.owner": "for people",
    "SlotClaim.created_at": "for people",
    "SlotClaim.process": "compared",
    "SlotClaim.ended_at": "for people",
    "SlotClaim.code": "each decoded as a CodeRecord",
    "SlotClaim.lost": "for people",
    "Tombstone.created_at": "for people",
    "Tombstone.rule": "for people",
    "Tombstone.partitions.env_name": "part of a path only quoted",
}
"""Texts of records that no path is made of as they are, and why."""


def pattern_of(of: Any) -> str | None:
    return next((meta.pattern for meta in getattr(of, "__metadata__", ()) if getattr(meta, "pattern", None)), None)


def sample(of: Any) -> Any:
    """A sound value of a type, as JSON."""
    if pattern_of(of):
        return next(text for text in FITTING if is_sound(text, of))
    origin, args = get_origin(of), get_args(of)
    if origin is Annotated:
        return sample(args[0])
    if origin is Literal:
        return args[0]
    if origin in (Union, types.UnionType):
        return sample(args[0])
    if origin is tuple and args[-1] is not Ellipsis:
        return [sample(each) for each in args]
    if origin in (tuple, Sequence, list):
        return [sample(args[0])]
    if origin in (Mapping, dict):
        return {sample(args[0]): sample(args[1])}
    if is_dataclass(of):
        hints = get_type_hints(of, include_extras=True)
        return {each.name: CHECKED.get(each.name) or sample(hints[each.name]) for each in fields(of)}
    return {int: 1, float: 1.0, bool: True, str: "text", Any: 1}[of]


def is_sound(value: Any, of: Any) -> bool:
    try:
        msgspec.convert(value, of)
    except msgspec.ValidationError:
        return False
    return True


def with_text(of: Any, text: str, where: str) -> Iterator[tuple[str, str | None, Any]]:
    """Yield each place of a type where a text may stand: its name, its pattern, and a sound value but for `text`."""
    origin, args = get_origin(of), get_args(of)
    if of in (str, Any) or pattern_of(of):
        yield where, pattern_of(of), text
    elif origin is Annotated or origin in (Union, types.UnionType):
        for each in args if origin is not Annotated else args[:1]:
            yield from with_text(each, text, where)
    elif origin in (tuple, Sequence, list):
        kinds = [each for each in args if each is not Ellipsis]
        for index, each in enumerate(kinds):
            for place, pattern, value in with_text(each, text, where):
                yield place, pattern, [value if at == index else sample(other) for at, other in enumerate(kinds)]
    elif origin in (Mapping, dict) and args[1] is Any:
        yield where, None, {"name": text}
    elif origin in (Mapping, dict):
        key, value_of = args
        for place, pattern, name in with_text(key, text, f"{where} key"):
            yield place, pattern, {name: sample(value_of)}
        for place, pattern, value in with_text(value_of, text, where):
            yield place, pattern, {sample(key): value}
    elif is_dataclass(of):
        hints = get_type_hints(of, include_extras=True)
        for field in fields(of):
            for place, pattern, value in with_text(hints[field.name], text, f"{where}.{field.name}"):
                yield place, pattern, sample(of) | {field.name: value}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_text_of_a_record_is_a_name_that_is_checked_or_makes_no_path(record: type) -> None:
    convert(sample(record), record)
    unknown = {
        place for place, pattern, _ in with_text(record, "x", record.__name__) if pattern is None and place not in TEXTS
    }
    assert unknown == set(), "give the field a type of ludic.root.json_records, or list it in TEXTS with the reason"


def test_no_text_that_is_listed_is_gone() -> None:
    places = {
        place for record in RECORDS for place, pattern, _ in with_text(record, "x", record.__name__) if not pattern
    }
    assert places == set(TEXTS)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_a_name_that_leads_out_is_refused_in_every_field(record: type) -> None:
    for name in HOSTILE:
        for place, pattern, value in with_text(record, name, record.__name__):
            if pattern is None:
                continue
            with pytest.raises(ValueError) as caught:
                convert(value, record)
            assert f" has {name!r}, wanted " in str(caught.value), place


@pytest.mark.parametrize("name", ["a", "a.b", "..a", "a..", "a/b.c", "a b", "ä/ö", "additional_chat_templates/x.jinja"])
def test_a_name_below_its_folder_is_taken(name: str) -> None:
    assert is_sound(name, RelativeName)


def test_the_error_says_which_file_has_which_name(root: Root) -> None:
    root.put(f"policies/version=1/{MANIFEST}", encode_json({"files": {"../../../.bashrc": "xxh3_64:0"}}))
    with pytest.raises(SchemaError) as caught:
        read_manifest(root, "policies/version=1")
    assert str(caught.value) == (
        f"{root.url}/policies/version=1/digests.json is no list of digests that ludic can read: files has "
        "'../../../.bashrc', wanted a path below its folder, without '..', '.', empty parts, '\\' and a drive"
    )
    identity = {"source": "m", "config": {}, "tokenizer": {"../x": "0"}, "weights": {}}
    root.put("model/identity.json", json.dumps(identity).encode())
    with pytest.raises(SchemaError, match=r"model/identity\.json is no identity .*: tokenizer has '\.\./x', wanted"):
        read_identity(root)
