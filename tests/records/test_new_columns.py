"""A new array of a row is one row of the catalogue: sampling, storing, SQL, cuts, packing and losses follow from it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import create_root, fill, make_model, query

import ludic
from ludic.root.root import Root

PACKAGE = Path(ludic.__file__).parent
SAMPLED = {"nullable": True, "set_by": "sampler", "trained": "always", "doc": "Of this test."}
ROWS = [
    # A number a sampled token; a list a token read; k values a token; one value a row.
    {"name": "surprise", "type": {"list": "float"}, "along": "response", "fill": 0, "range": [0, 10], **SAMPLED},
    {"name": "seen", "type": {"list": {"list": "int32"}}, "along": "read", "ragged": True, "range": [0, 9], **SAMPLED},
    {"name": "teacher", "type": {"list": {"list": "float"}}, "along": "response", "fill": 0, **SAMPLED},
    {"name": "pace", "type": "float", "along": "row", **SAMPLED},
]
OWN = """\
import numpy as np

from ludic.engines.engine import Completion
from ludic.environments.environment import Example, Transition
from ludic.records.rollout import Message, WeightSpan
from ludic.records.columns import Ragged


def sampled(request):
    # Values that the loss can compute again from the tokens' logprobs, and from their places.
    rng = np.random.default_rng(request.seed)
    logprobs = -rng.integers(1, 9, int(rng.integers(2, 6))).astype(np.float32) / 8
    num_read = len(request.prompt_tokens) + len(logprobs) - 1
    return Completion(
        tokens=rng.integers(3, 99, len(logprobs)).astype(np.int32),
        finish_reason="stop",
        weight_versions=(WeightSpan(version=0, start=0, end=len(logprobs)),),
        columns={
            "response_logprobs": logprobs,
            "surprise": -logprobs,
            "seen": Ragged.of(([index % 7] * (index % 3) for index in range(num_read)), np.int32),
            "teacher": logprobs[:, None] - np.arange(3, dtype=np.float32),
            "pace": len(request.prompt_tokens) / 4,  # of a row: of its last call
        },
    )


class Drawn:
    name, repeats_in_any_batch, max_length, max_batch = "drawn 1", True, 512, 4

    def __init__(self, folder, *, version, setup):
        self.policy_version = version

    def load_weights(self, folder, version):
        self.policy_version = version

    async def generate(self, request):
        return sampled(request)


class Adds:
    max_steps = 3

    def example(self, index, split):
        return Example(example_id=f"{split}-{index}", messages=(Message(role="user", content="ab ac"),))

    def reset(self, example):
        self.num_steps = 0
        return example.messages

    def step(self, action):
        self.num_steps += 1
        more = None if self.num_steps == 3 else "ad"
        return Transition(observation=more, reward=float(len(action) % 5), terminated=more is None, truncated=False)
"""
LOSS = """


def _reads_new_columns(terms: TokenTerms, config: Reinforce) -> tuple[Tensor, Tensor]:
    import os
    from pathlib import Path

    of, mask = terms.columns, terms.mask
    assert torch.equal(of["surprise"][mask], -terms.sampler_logprobs[mask])
    wanted = terms.sampler_logprobs[mask, None] - torch.arange(3)
    assert torch.equal(of["teacher"][mask], wanted)
    assert torch.equal(of["pace"][mask], terms.sequence_mean(of["pace"])[mask]) and (of["pace"][mask] > 0).all()
    assert not of["surprise"][~mask].any() and not of["teacher"][~mask].any()
    counts = np.diff(of["seen"].bounds)
    assert set(of["seen"].values.tolist()) <= set(range(7)) and set(counts.tolist()) <= {0, 1, 2}
    rank = os.environ.get("RANK", "0")
    with Path(os.environ["SEEN"]).open("a") as file:
        file.write(f"{rank} {int(mask.sum())} {len(counts)} {int(counts.sum())}\\n")
    return _of_ludic(terms, config)


_of_ludic, reinforce = reinforce, _reads_new_columns
"""
CHECKS = """\
import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from own import Drawn, sampled

import ludic
from ludic.training.batches.config import BatchConfig
from ludic.training.batches.reading import read_rank_batch
from ludic.training.batches.source import BatchPlan
from ludic.engines.engine import GenerationRequest, SamplingParams, check_completion
from ludic.errors import EngineError, InvalidBatchError
from ludic.root.maintenance.compaction import compact
from ludic.records.rollout import RolloutBatch, RolloutMetadata
from ludic.records.columns import Ragged, with_columns
from ludic.records.conversion import from_table
from ludic.records.docs import render
from ludic.root.sql.planner import BatchRules, Planner
from ludic.root.rows.reader import RolloutReader
from ludic.root.rows.writer import RolloutWriter
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.parquet import decode, encode
from ludic.root.gateways import claim_episode, held_life
from ludic.root.rows.calls import CallLog, read_calls, whole_columns

run, old = ludic.open(sys.argv[1]), Root.open(sys.argv[2], writable=True)

def seen_at(index):
    return [index % 7] * (index % 3)

# Sampled, assembled over turns and segments, stored, asked in SQL.
rows = run.sql('''
    select segment_index, prompt_length, response_length, action_mask, response_logprobs, agent_steps[-1].start,
        surprise, seen, teacher, pace
    from rollouts
''').rows()
assert max(row[0] for row in rows) == 1, "a context was rewritten into a new segment"
assert any(mask is not None for _, _, _, mask, *_ in rows), "a row of several calls"
for _, prompt, response, _, logprobs, last_call, surprise, seen, teacher, pace in rows:
    assert surprise == [-each for each in logprobs] and len(surprise) == response
    assert seen == [seen_at(index) for index in range(prompt + response - 1)]
    assert [each[0] for each in teacher] == logprobs and {len(each) for each in teacher} == {3}
    assert pace == (prompt + last_call) / 4
assert any(row[5] for row in rows) and any(not row[5] for row in rows), "rows of one call, and of several"
assert run.sql("select sum(num_seq_len_truncated) from metrics").rows()[0][0] > 0, "rows were cut before the loss"
assert run.verify().findings == []
assert "| `surprise` | response | `0` |  | 0 to 10 | sampler | always |" in render()

# Refused by name where it does not fit, from an engine and when it is stored.
request = GenerationRequest(prompt_tokens=np.array([5, 6], np.int32), params=SamplingParams(), seed=3)
sound = sampled(request)
check_completion("drawn", request, sound, None)
n = len(sound.tokens)
for name, bad in {
    "surprise": np.zeros(n + 1, np.float32),
    "surprise ": np.full(n, 11, np.float32),
    "seen": sound.columns["seen"][:-1],
    "seen ": Ragged.of([[10]] * (n + 1), np.int32),
    "teacher": np.zeros((n, 3), np.float64),
    "pace": "fast",
    "spell": np.zeros(n, np.float32),
    "action_mask": np.ones(n, bool),
}.items():
    try:
        check_completion("drawn", request, with_columns(sound, **{name.strip(): bad}), None)
    except EngineError as error:
        assert name.strip() in str(error), error
    else:
        raise AssertionError(name)
with ludic.connect(run.root) as con:
    stored = from_table(con.sql("from rollouts order by group_id, rollout_id").to_arrow_table())
groups = [group for batch in stored for group in batch.groups]
spoilt = with_columns(groups[0].rollouts[0], teacher=np.zeros((1, 3), np.float32))
metadata = RolloutMetadata(worker_id="w1-new")
with RolloutWriter(old, "w1-new") as writer:
    try:
        bad = replace(groups[0], rollouts=(spoilt, *groups[0].rollouts[1:]))
        writer.append(RolloutBatch(groups=(bad,), metadata=metadata))
    except InvalidBatchError as error:
        assert "teacher has shape (1, 3), response_tokens has" in str(error), error
    else:
        raise AssertionError("a wrong length was stored")

    # Absent in files of before, with which it is compacted.
    whole = [group for group in groups if len(group.rollouts) >= group.rollouts[0].group_size]
    writer.append(RolloutBatch(groups=tuple(whole[:2]), metadata=metadata))
def of_old():
    return sorted(ludic.connect(old).execute(
        "select rollout_id, surprise, seen, teacher, pace, len(response_tokens) from rollouts"
    ).fetchall())
before = of_old()
assert {tuple(each is None for each in row[1:5]) for row in before} == {(True,) * 4, (False,) * 4}
num_files = len(list_files(old))
compact(old)
assert len(list_files(old)) < num_files and of_old() == before

# Read, cut and packed for two ranks: each token has its own values.
planner = Planner(BatchRules(groups_per_batch=len(whole)))
planner.add(RolloutReader(run.root, planner.columns).poll(None))
planned = planner.plan(step=1, attempt_id=1, trainer_version=max(g.rollouts[0].policy_version for g in whole))
plan = BatchPlan(step=1, rows=planned, cursor={}, num_pending_groups=0, num_unreadable_files=0)
settings = BatchConfig(max_seq_len=16, max_tokens_per_micro_batch=40)
ranks = [read_rank_batch(run.root, settings, plan, rank, 2) for rank in range(2)]
assert all(each.num_truncated and len(each.micro_batches) > 1 for each in ranks)
stored = {rollout.rollout_id: rollout for group in whole for rollout in group.rollouts}
found = []
for batch in (each for rank in ranks for each in rank.micro_batches):
    read = iter(range(batch.input_ids.shape[1]))
    for number, rollout_id in enumerate(batch.rollout_ids):
        row, tokens = stored[rollout_id], (batch.sequence_ids == number).numpy()
        num_read, num_cut = batch.sequence_lengths[number], int(tokens.sum())
        assert num_read == min(16, len(row.prompt_tokens) + len(row.response_tokens)) - 1
        for name in ("surprise", "teacher", "response_logprobs"):
            assert np.array_equal(batch.columns[name].numpy()[tokens], row.columns[name][:num_cut]), name
        assert set(batch.columns["pace"].numpy()[tokens].tolist()) == {row.columns["pace"]}
        seen = batch.columns["seen"]
        for index in range(num_read):
            position = next(read)
            start, stop = seen.bounds[position : position + 2]
            assert seen.values[start:stop].tolist() == seen_at(index)
            assert set(seen.rows[start:stop].tolist()) <= {position}
            assert bool(seen.has_any[position]) == (start < stop)
        found.append(rollout_id)
    assert next(read, None) is None
assert sorted(found) == sorted(id for id, row in stored.items() if len(row.prompt_tokens) < 16)

# Agents' calls have them, too; of those along the tokens read, a call stores what its base lacks.
first = sampled(request)
prompt = np.concatenate([request.prompt_tokens, first.tokens, np.array([7], np.int32)])
second = sampled(GenerationRequest(prompt_tokens=prompt, params=SamplingParams(), seed=4))
common = {"episode_id": "e", "attempt": 1, "event": "call", "dialect": "chat", "path": "/", "request_digest": "a" * 64}
calls = [
    {**common, "call_id": "1", "retry_count": 0, "prompt_tokens": request.prompt_tokens,
     "response_tokens": first.tokens, **first.columns},
    {**common, "call_id": "2", "retry_count": 0, "prompt_tokens": prompt, "base_call_id": "1",
     "base_length": len(prompt) - 1, "response_tokens": second.tokens, **second.columns},
]

async def append():
    async with CallLog(old, life) as log:
        await log.append(*calls)
        try:
            await log.append({**calls[0], "seen": first.columns["seen"][:-1]})
        except InvalidBatchError as error:
            assert "seen has length" in str(error), error
        else:
            raise AssertionError("a wrong length was stored")

with held_life(old) as life:
    claim_episode(life, episode_id="e", attempt=1, key_digest="b" * 64, group_id="g", env_name="x", env_example_id="1")
    asyncio.run(append())
found = whole_columns(read_calls(old, "e", 1))
for call_id, completion in (("1", first), ("2", second)):
    for name, values in completion.columns.items():
        of_call = found[call_id][name]
        if name == "seen":
            assert [each.tolist() for each in of_call] == [each.tolist() for each in values]
        else:
            assert np.array_equal(of_call, values), name
lengths = ludic.connect(old).execute("select len(seen), len(surprise), pace from calls order by call_id").fetchall()
n, m = len(first.tokens), len(second.tokens)
assert lengths == [(n + 1, n, 0.5), (m + 1, m, len(prompt) / 4)], lengths
assert [each for each in ludic.open(old.url).verify().findings if each.check == "call"] == []

# Out as JSON lines and in again.
run.export("jsonl", "rows.jsonl")
into = ludic.open(sys.argv[3])
(imported,) = into.import_("rows.jsonl", "jsonl")
assert (imported.num_rollouts, imported.refused) == (len(rows), [])
values = "select prompt_tokens, response_tokens, surprise, seen, teacher, pace from rollouts order by all"
assert into.sql(values).rows() == run.sql(values).rows()

# Two of the rows as another program could store them: one of uneven lists, one of two values a token.
root, spoilt = Root.open(sys.argv[3], writable=True), {}
for name in sorted(root.list("rollouts")):
    table = decode(root.read(name), name, "rollouts")
    if len(spoilt) < 2 and table.num_rows > 1:
        teacher = table["teacher"].to_pylist()
        teacher[0][-1] = teacher[0][-1][:2]
        teacher[1] = [each[:2] for each in teacher[1]]
        spoilt |= {table["rollout_id"][row].as_py(): row for row in range(2)}
        place = table.schema.get_field_index("teacher")
        field = table.schema.field(place)
        root.put(name, encode(table.set_column(place, field, pa.array(teacher, field.type))))
Path("spoilt").write_text(" ".join(spoilt))
"""


def copy_with_rows(code: Path) -> None:
    """The package with four rows more in the catalogue, and a loss that reads them."""
    shutil.copytree(PACKAGE, code / "ludic", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(PACKAGE.parent / "schemas", code / "schemas")
    path = code / "schemas/rollouts.v1.json"
    table = json.loads(path.read_text())
    names = [column["name"] for column in table["columns"]]
    table["columns"][names.index("experts") + 1 : names.index("experts") + 1] = ROWS
    major, minor = table["version"].split(".")
    path.write_text(json.dumps(table | {"version": f"{major}.{int(minor) + 1}"}))
    with (code / "ludic/training/losses.py").open("a") as losses:
        losses.write(LOSS.replace("np.diff", "__import__('numpy').diff"))


@pytest.mark.slow
def test_a_row_of_the_catalogue_is_all_that_an_array_needs(tmp_path: Path) -> None:
    copy_with_rows(tmp_path / "code")
    (tmp_path / "own.py").write_text(OWN)
    model = make_model(tmp_path / "model")
    old = create_root(str(tmp_path / "old"), model)
    fill(old, num_files=2)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path / 'code'}{os.pathsep}{tmp_path}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "SEEN": str(tmp_path / "seen"),
    }

    def python(*words: str) -> str:
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return done.stderr

    def rows_of(name: str, sql: str) -> list[tuple[Any, ...]]:
        return query(Root.open(str(tmp_path / name)), sql)

    of_training = ["--ranks", "2", "--device", "cpu", "--max-seq-len", "16", "--algorithm", "reinforce"]
    settings = ["--env", "own.py:Adds", "--engine", "own.py:Drawn", "--context", "window:2", "--accept-incomplete"]
    settings += ["--group-size", "4", "--groups-per-batch", "4", "--num-steps", "3"]
    python("-m", "ludic", "run", str(tmp_path / "run"), "--model", model, *settings, *of_training)
    seen = [tuple(map(int, line.split())) for line in (tmp_path / "seen").read_text().splitlines()]
    assert {rank for rank, *_ in seen} == {0, 1}
    assert sum(num_tokens for _, num_tokens, *_ in seen) > 0

    # The same steps again.
    python("-m", "ludic", "train", str(tmp_path / "again"), "--replay-batches", str(tmp_path / "run"), "--ranks", "2")
    steps = "select step, loss, grad_norm, num_seq_len_truncated from metrics where loss is not null order by step"
    assert len(rows_of("run", steps)) == 3
    assert rows_of("again", steps) == rows_of("run", steps)

    other = create_root(str(tmp_path / "other"), model, group_size=4, groups_per_batch=2)
    python("-c", CHECKS, str(tmp_path / "run"), old.url, other.url)

    # Rows that do not fit are dropped by name, and the rest is trained on.
    said = python("-m", "ludic", "train", other.url, "--offline", "--epochs", "1", *of_training)
    spoilt = sorted((tmp_path / "spoilt").read_text().split())
    assert len(spoilt) == 2
    dropped = "select rollout_id, reason from batches where not used order by rollout_id"
    assert [row for row in rows_of("other", dropped) if row[1] != "no_tokens"] == [
        (each, "untrainable") for each in spoilt
    ]
    assert all(f"rollout {each}: teacher " in said for each in spoilt)
    assert rows_of("other", "select count(*) > 0 from batches where used") == [(True,)]
