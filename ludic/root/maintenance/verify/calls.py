"""Check agents' calls: digests of each call and of its chain, and the prompts that calls name.

A call is stored as its difference to an earlier one of its episode. So episodes are read whole, some at a time, and
their prompts put together as readers do. Raises StoreError if the filesystem fails.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress

import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import SchemaError
from ludic.root.catalogue import CALLS, PROMPTS, PromptName
from ludic.root.maintenance.verify.checks import Finding, reason_of
from ludic.root.root import Root
from ludic.root.rows.calls import chain_digests_of, digests_of, read_prompt
from ludic.root.rows.parquet import open_parquet, read_within
from ludic.root.rows.tables import read_table

_EPISODE_ROWS = 1 << 15
"""Rows of the episodes that are checked together."""
_MOST_SHOWN = 5

_Attempt = tuple[str, int]
"""episode_id and attempt."""


def check_calls(root: Root, names: Sequence[str]) -> Iterator[Finding]:
    """Check the calls in these files, which can be read, and all prompts."""
    prompts = {found.sha256 for found in PROMPTS.listed(root)}
    yield from _check_prompts(root, sorted(prompts))
    files = _episodes_by_file(root, names)
    for episodes in _some_at_a_time(files):
        rows = _read(root, [name for name, counts in files.items() if not episodes.isdisjoint(counts)], episodes)
        yield from _check_rows(rows, prompts)


def _check_prompts(root: Root, digests: Sequence[str]) -> Iterator[Finding]:
    for sha256 in digests:
        try:
            read_prompt(root, sha256)
        except SchemaError as error:
            if root.exists(name := PROMPTS.name(PromptName(sha256))):
                yield Finding(check="call", where=name, problem=reason_of(error).removeprefix(f"{root.url}/{name} "))


def _episodes_by_file(root: Root, names: Sequence[str]) -> dict[str, Mapping[_Attempt, int]]:
    """Return the number of rows of each episode in each file."""
    found: dict[str, Mapping[_Attempt, int]] = {}
    for name in names:
        with suppress(FileNotFoundError):  # a compaction or an expiry has deleted it since
            with open_parquet(root, name, CALLS.table) as parquet:
                keys = read_within(parquet, range(parquet.num_row_groups), ["episode_id", "attempt"], name)
            counts = keys.group_by(["episode_id", "attempt"], use_threads=False).aggregate([([], "count_all")])
            found[name] = {(row["episode_id"], row["attempt"]): row["count_all"] for row in counts.to_pylist()}
    return found


def _some_at_a_time(files: Mapping[str, Mapping[_Attempt, int]]) -> Iterator[set[_Attempt]]:
    """Yield all episodes in sets of about _EPISODE_ROWS rows, those of a file together."""
    totals: dict[_Attempt, int] = {}
    for counts in files.values():
        for episode, count in counts.items():
            totals[episode] = totals.get(episode, 0) + count
    chosen, num_rows = set[_Attempt](), 0
    for episode, count in totals.items():
        if chosen and num_rows + count > _EPISODE_ROWS:
            yield chosen
            chosen, num_rows = set(), 0
        chosen.add(episode)
        num_rows += count
    if chosen:
        yield chosen


def _read(root: Root, names: Sequence[str], episodes: Collection[_Attempt]) -> dict[_Attempt, pa.Table]:
    tables = []
    for name in names:
        found = CALLS.parse(name)
        assert found is not None
        with suppress(FileNotFoundError):
            rows = read_table(root, CALLS, found)
            tables.append(rows.filter(pc.equal(rows["event"], "call")))
    if not tables:
        return {}
    rows = pa.concat_tables(tables)
    indexes: dict[_Attempt, dict[str, int]] = {}
    keys = (rows[name].to_pylist() for name in ("episode_id", "attempt", "call_id"))
    for index, (episode_id, attempt, call_id) in enumerate(zip(*keys, strict=True)):
        if (episode_id, attempt) in episodes:
            indexes.setdefault((episode_id, attempt), {}).setdefault(call_id, index)
    return {episode: rows.take(pa.array(list(of.values()), pa.int64())) for episode, of in indexes.items()}


def _check_rows(by_episode: Mapping[_Attempt, pa.Table], prompts: Collection[str]) -> Iterator[Finding]:
    for (episode_id, attempt), rows in by_episode.items():
        where = f"episode {episode_id}, attempt {attempt}"
        problems = [*_wrong_digests(rows), *_missing_prompts(rows, prompts)]
        try:
            problems += _wrong_chains(rows)
        except SchemaError as error:
            problems.append(reason_of(error))
        for problem in problems[:_MOST_SHOWN]:
            yield Finding(check="call", where="", problem=f"{where}: {problem}")
        if len(problems) > _MOST_SHOWN:
            yield Finding(check="call", where="", problem=f"{where}: and {len(problems) - _MOST_SHOWN:,} more")


def _wrong_digests(rows: pa.Table) -> Iterator[str]:
    stored = zip(rows["call_id"].to_pylist(), rows["call_digest"].to_pylist(), digests_of(rows), strict=True)
    for call_id, digest, own in stored:
        if digest is not None and digest != own:
            yield f"call {call_id} does not match its digest, so it was changed since it was stored"


def _missing_prompts(rows: pa.Table, prompts: Collection[str]) -> Iterator[str]:
    named = {each for name in ("system_digest", "tools_digest") for each in rows[name].unique().to_pylist() if each}
    for digest in sorted(named.difference(prompts)):
        yield f"{PROMPTS.name(PromptName(digest))} is missing, which its calls name"


def _wrong_chains(rows: pa.Table) -> Iterator[str]:
    found = chain_digests_of(rows)
    for call_id, digest in zip(rows["call_id"].to_pylist(), rows["chain_digest"].to_pylist(), strict=True):
        if digest is not None and call_id in found and digest != found[call_id]:
            yield f"call {call_id} does not match the digest of its chain, so a call that it extends was changed"
