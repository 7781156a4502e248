"""Find the code that the rules of a batch name, and describe it for the records of attempts."""

from collections.abc import Collection
from hashlib import sha256

from ludic.consent import CodeUse, Role
from ludic.installed import LUDIC, name_and_version
from ludic.sql.library import read_packaged
from ludic.sql.planner import BatchRules
from ludic.store.code_files import CodeRecord, describe_file
from ludic.user_files import Files, file_of

_FOLDERS: dict[Role, str] = {"advantage": "advantages", "filter": "filters", "selection": "selections"}


def rule_uses(rules: BatchRules, named_by_root: Collection[str] = ()) -> list[CodeUse]:
    """Return the uses of advantage, filters and selection. named_by_root: names that come from the root."""
    names: list[tuple[Role, str]] = [
        ("advantage", rules.advantage),
        *(("filter", name) for name in dict.fromkeys(rules.filters)),
        ("selection", rules.selection),
    ]
    return [CodeUse(role=role, setting=name, named_by_root=name in named_by_root) for role, name in names]


def describe_rules(rules: BatchRules) -> list[CodeRecord]:
    """Return a record of each advantage, filter and selection; rules.files holds the users' files."""
    return [_describe(use, rules.files) for use in rule_uses(rules)]


def _describe(use: CodeUse, files: Files) -> CodeRecord:
    name = file_of(use.setting)
    if name is not None:
        return describe_file(use, files, name)
    text = read_packaged(_FOLDERS[use.role], use.setting)
    digest = sha256(text.encode()).hexdigest()
    return CodeRecord(role=use.role, name=use.setting, sha256=digest, package=name_and_version(LUDIC))
