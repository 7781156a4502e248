"""Trajectories of ATIF: what `ludic export` writes comes back, and what others write is read or refused by step."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import as_plain, changed, rollout_batches
from tiny_runs import create_root

from ludic.adapters.imports.formats import load_format
from ludic.adapters.imports.importing import import_file
from ludic.app.operations.run import Run
from ludic.models.chat import load_tokenizer
from ludic.records.conversion import from_table
from ludic.records.rollout import Message, Rollout, RolloutBatch, ToolCall, new_id
from ludic.records.tables import arrow_schema
from ludic.root.json_records import ImportReport
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.parquet import read_columns
from ludic.root.rows.writer import RolloutWriter
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run


def bring_in(root: Root, path: Path, name: str = "atif") -> ImportReport:
    model = root.record.model
    return import_file(
        root,
        str(path),
        load_format(name),
        env_name="cats",
        tokenizer=model,
        get_tokenizer=lambda: load_tokenizer(model),
    )


def rows_of(root: Root) -> list[Rollout]:
    names = arrow_schema("rollouts").names
    files = [file for folder in ("rollouts", "evals") for file in list_files(root, None, folder)]
    batches = [batch for file in files for batch in from_table(read_columns(root, file.name, names))]
    return [row for batch in batches for group in batch.groups for row in group.rollouts]


# --- What ludic exports -----------------------------------------------------------------------------------

_TEXT = st.text(max_size=5)
_arguments = st.dictionaries(_TEXT, st.integers() | _TEXT, max_size=2).map(json.dumps) | _TEXT.filter(str.strip)
_calls = st.lists(
    st.builds(ToolCall, id=_TEXT, name=st.text(min_size=1, max_size=3), arguments=_arguments), max_size=2
).map(tuple)
_said = st.builds(Message, role=st.just("assistant"), content=_TEXT, tool_calls=_calls, reasoning=st.none() | _TEXT)
_others = st.builds(
    Message, role=st.sampled_from(["system", "developer", "user"]), content=_TEXT, name=st.none() | _TEXT
)
_results = st.builds(Message, role=st.just("tool"), content=_TEXT, tool_call_id=st.none() | _TEXT, name=st.none() | _TEXT)
_conversations = st.lists(_said | _others | _results, max_size=5).map(tuple)


def as_read(row: Rollout) -> Any:
    """The tokens that a model read and sampled, and all that belongs to the sampled ones."""
    mask = np.ones(row.response_length, np.bool_) if row.action_mask is None else row.action_mask
    left_out = ("experts", "token_rewards", *(() if row.response_length else ("kept_tokens",)))
    arrays = {name: values for name, values in row.columns.items() if name not in left_out}
    arrays["response_logprobs"] = row.response_logprobs + np.float32(0)  # -0 is 0
    rewards = np.where(mask, row.token_rewards, np.float32(0)) + np.float32(0)
    return as_plain({**arrays, "action_mask": mask, "rewards": rewards})


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(batch=rollout_batches(), data=st.data())
def test_what_ludic_exports_as_atif_comes_back(batch: RolloutBatch, data: st.DataObject):
    groups = [
        replace(
            group,
            rollouts=tuple(
                changed(row, trajectory_id=None, messages=data.draw(_conversations)) for row in group.rollouts
            ),
        )
        for group in batch.groups
    ]
    batch = replace(batch, groups=tuple(groups), metadata=replace(batch.metadata, worker_id="w0-test"))
    origin, root = (put_run(f"memory://{new_id()}", RunConfig(model="none", env=("cats",))) for _ in range(2))
    with RolloutWriter(origin, "w0-test") as writer:
        writer.append(batch)
    with tempfile.TemporaryDirectory() as folder:
        Run(origin).export("atif", Path(folder) / "rows.jsonl")
        report = bring_in(root, Path(folder) / "rows.jsonl")
    assert report.refused == []
    wanted: dict[tuple[str, str], list[Rollout]] = {}
    for group in batch.groups:
        for row, key in zip(group.rollouts, group.trajectory_ids(), strict=True):
            wanted.setdefault((row.episode_id, key), []).append(row)
    found: dict[tuple[str, str], list[Rollout]] = {}
    for row in rows_of(root):
        found.setdefault((row.metadata["session_id"], row.metadata["trajectory_id"]), []).append(row)
    assert {key: [*map(as_read, rows)] for key, rows in found.items()} == {
        key: [*map(as_read, rows)] for key, rows in wanted.items()
    }
    for key, rows in wanted.items():
        for name in ("episode_reward", "reward_components", "env_name", "agent_id", "model", "error", "purpose"):
            assert as_plain(getattr(found[key][0], name)) == as_plain(getattr(rows[0], name)), name
