"""A trajectory, one agent's one life in an episode, counts once in every baseline, however many rows it has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isnan, sqrt
from operator import itemgetter
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from root.sql.conftest import connection
from root.sql.test_agent_advantages import HALF, TINY, child, estimate, row
from strategies import changed

import ludic
from ludic.base.by_name import packaged_names
from ludic.records.conversion import to_table
from ludic.records.rollout import (
    GROUP_CLOSED,
    AgentStep,
    EnvironmentStep,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    RolloutMetadata,
)
from ludic.root.root import Root
from ludic.root.sql.library import advantages

ADVANTAGES = packaged_names("advantages")
PARAMS: Mapping[str, dict[str, Any]] = {
    "fold_grpo": {"context_limit": 1000},
    "overlong": {"max_length": 8, "margin": 8},
    "pass_at_k": {"k": 2},
    "child_credit": {"inherit_weight": 0.0},
}
"""Parameters without a default, and a child_credit of the child alone."""


@dataclass(frozen=True)
class Turn:
    """A completion of two tokens, the second with the reward; the environment answers with one token."""

    reward: float
    state: str = "start"
    """Hash of the observation before it."""


def rows_of(trajectory: Rollout, turns: Sequence[Turn], splits: Sequence[int] = ()) -> list[Rollout]:
    """The rows of a trajectory, whose context was rewritten before the turns with these indexes."""
    starts = [0, *splits, len(turns)]
    parts = [turns[start:end] for start, end in pairwise(starts)]
    return [_row_of(trajectory, part, segment, starts[segment]) for segment, part in enumerate(parts)]


def _row_of(trajectory: Rollout, turns: Sequence[Turn], segment: int, first_turn: int) -> Rollout:
    length = 3 * len(turns) - 1
    token_rewards, mask = np.zeros(length, np.float32), np.arange(length) % 3 < 2
    token_rewards[1::3] = [turn.reward for turn in turns]
    steps = [(3 * i, 3 * i + 2, first_turn + i) for i in range(len(turns))]
    environment_steps = tuple(
        EnvironmentStep(
            turn=first_turn + i,
            agent_steps=(i,),
            observation=None,
            observation_hash=turn.state,
            action=None,
            next_observation=None,
            reward=turn.reward,
            terminated=False,
            truncated=False,
        )
        for i, turn in enumerate(turns)
    )
    return changed(
        trajectory,
        rollout_id=trajectory.rollout_id if segment == 0 else f"{trajectory.rollout_id}+{segment}",
        trajectory_id=trajectory.rollout_id,
        segment_index=segment,
        response_tokens=np.arange(length, dtype=np.int32) + 10 * first_turn,
        response_logprobs=np.zeros(length, np.float32),
        token_rewards=token_rewards,
        action_mask=None if mask.all() else mask,
        reward_components={"correct": trajectory.episode_reward or 0.0},
        agent_steps=tuple(AgentStep(turn=turn, action_target="env", start=a, end=b) for a, b, turn in steps),
        environment_steps=environment_steps,
    )


def by_turn(name: str, rows: Sequence[Rollout], **params: Any) -> dict[tuple[str, int], float]:
    """The advantage of each completion, by trajectory and turn; a pair's side by its first turn alone."""
    group = RolloutGroup(key="g", rollouts=tuple(replace(each, group_id="g") for each in rows))
    batch = RolloutBatch(groups=(group,), metadata=RolloutMetadata(worker_id="worker"))
    con = connection()
    con.register("rollouts", to_table(batch, run_id="run", sequence=0))
    table = advantages(con, name, **{**PARAMS.get(name, {}), **params})
    found = {line.pop("rollout_id"): line for line in table.to_pylist()}
    values = {}
    for each in rows:
        if each.rollout_id not in found or not any(value is not None for value in found[each.rollout_id].values()):
            continue
        for step in each.agent_steps:
            value = found[each.rollout_id].get("advantage")
            values[each.trajectory_id or each.rollout_id, step.turn] = (
                found[each.rollout_id]["token_advantages"][step.start] if value is None else value
            )
    return {key: value for key, value in values.items() if name != "best_worst" or key[1] == 0}


def family(
    rewards: Sequence[tuple[float, float, float]],
    turns: Sequence[Sequence[Turn]] | None = None,
    splits: Sequence[Sequence[int]] = (),
) -> list[Rollout]:
    """Episodes with a parent and two scored siblings; the rewards of the three, by episode; two turns if not said."""
    trajectories = []
    for index, (parent, *siblings) in enumerate(rewards):
        root = row(f"p{index}", f"e{index}", parent, request_index=index, group_index=index, group_size=len(rewards))
        indexes = {"request_index": index, "group_index": index, "group_size": len(rewards)}
        trajectories += [root, *(child(f"{n}{index}", root, r, **indexes) for n, r in zip("km", siblings, strict=True))]
    turns = turns or [[Turn(0.0, t.rollout_id + "a"), Turn(t.episode_reward or 0, t.rollout_id)] for t in trajectories]
    splits = splits or [()] * len(trajectories)
    parts = zip(trajectories, turns, splits, strict=True)
    return [each for trajectory, its, split in parts for each in rows_of(trajectory, its, split)]


# Parents 1 and 0; solvers 1 and 0, .5 and 0. One parent and two siblings have two rows.
REWARDS = [(1.0, 1.0, 0.0), (0.0, 0.5, 0.0)]
SPLITS = [(1,), (1,), (), (), (1,), ()]
TRAJECTORIES = ("p0", "k0", "m0", "p1", "k1", "m1")


@pytest.fixture(params=[True, False], ids=["stored", "derived"])
def rows(request) -> list[Rollout]:
    """The family, with trajectory_id as workers store it, and as rows before rollouts 1.4 lack it."""
    found = family(REWARDS, splits=SPLITS)
    return found if request.param else [replace(each, trajectory_id=None) for each in found]


def by_trajectory(name: str, rows: Sequence[Rollout], **params: Any) -> dict[str, float]:
    """The mean advantage over the turns of each trajectory."""
    ids = dict(
        zip([r.rollout_id for r in rows], RolloutGroup(key="", rollouts=tuple(rows)).trajectory_ids(), strict=True)
    )
    named = [replace(each, trajectory_id=each.trajectory_id or None) for each in rows]
    values: dict[str, list[float]] = {}
    for (rollout_id, _), value in by_turn(name, named, **params).items():
        values.setdefault(ids.get(rollout_id, rollout_id), []).append(value)
    return {key: fmean(each) for key, each in values.items()}


MEAN, STD = 0.375, sqrt((0.625**2 + 2 * 0.375**2 + 0.125**2) / 3)
"""Of the solvers' rewards 1, 0, .5 and 0."""
BY_HAND = {
    # parents 1 - 0 and 0 - 1; solvers 1 - .5/3, 0 - 1.5/3, .5 - 1/3, 0 - 1.5/3
    "rloo": (1, 5 / 6, -0.5, -1, 1 / 6, -0.5),
    "child_credit": (1, 5 / 6, -0.5, -1, 1 / 6, -0.5),
    "length_penalty": (1, 5 / 6, -0.5, -1, 1 / 6, -0.5),
    # of one group, the batch's mean is the group's
    **dict.fromkeys(("dr_grpo", "reinforce", "opo"), (0.5, 0.625, -MEAN, -0.5, 0.125, -MEAN)),
    **dict.fromkeys(
        ("grpo", "grpo_by_agent", "reinforce_pp", "lite_ppo", "overlong"),
        (HALF, 0.625 / STD, -MEAN / STD, -HALF, 0.125 / STD, -MEAN / STD),
    ),
    # R = 1 - C(1, 2) / C(2, 2) = 1 for the parents: nothing to choose; solvers: 3 failures of 4, R = 1 - 3/6,
    # S = 1/2; a success 1 - R over S, a failure (1 - R - C(2, 1) / C(3, 1)) / S
    "pass_at_k": (0, 1, -1 / 3, 0, -1 / 3, -1 / 3),
    "best_worst": (1, -1),
    "zero": (0,) * 6,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_parents_and_siblings_are_compared_with_their_own_kind_each_once(name: str, rows: list[Rollout]):
    params = {"epsilon": TINY} if name in ("grpo", "grpo_by_agent", "reinforce_pp", "lite_ppo", "overlong") else {}
    names = ("p0", "p1") if name == "best_worst" else TRAJECTORIES
    assert by_trajectory(name, rows, **params) == pytest.approx(dict(zip(names, BY_HAND[name], strict=True)), abs=1e-6)


def test_rae_takes_siblings_one_after_the_other(rows: list[Rollout]):
    # decay 1/2: parents 1 - 0, 0 - 1/2; solvers 1 - 0, 0 - 1/2, 1/2 - 1/4, 0 - 3/8
    found = by_trajectory("rae", rows, decay=0.5)
    assert found == dict(zip(TRAJECTORIES, (1, 1, -0.5, -0.5, 0.25, -0.375), strict=True))


@pytest.mark.parametrize("rows", [False], ids=["derived"], indirect=True)
@pytest.mark.parametrize("name", sorted({*ADVANTAGES} - {"rae", "token_returns"}))
def test_advantages_of_trajectories_that_share_a_baseline_sum_to_zero(name: str, rows: list[Rollout]):
    # rae: of earlier episodes; token_returns: over tokens; fold_grpo: a child has the reward of its parent
    found = by_trajectory(name, rows)
    kinds = ("p",) if name == "fold_grpo" else ("p", "km")
    for kind in kinds:
        assert sum(value for key, value in found.items() if key[0] in kind) == pytest.approx(0, abs=1e-5)


# --- Rows do not count --------------------------------------------------------------------------------------

_TURNS = st.lists(
    st.builds(Turn, st.sampled_from([-1.0, 0.0, 0.5, 2.0]), st.sampled_from("ab")), min_size=1, max_size=4
)


@st.composite
def trajectories(draw: st.DrawFn) -> tuple[list[Rollout], list[Rollout]]:
    """A family of two episodes, with a row for each trajectory, and with rewritten contexts. Siblings may be alike."""
    turns = [draw(_TURNS) for _ in range(6)]
    rewards = np.array([sum(turn.reward for turn in each) for each in turns]).reshape(2, 3)
    splits = [draw(st.sets(st.integers(1, len(each) - 1)).map(sorted)) if len(each) > 1 else [] for each in turns]
    whole, cut = family(rewards.tolist(), turns), family(rewards.tolist(), turns, splits)
    return whole, draw(st.permutations(cut))


# token_returns are about the tokens of one row.
@pytest.mark.parametrize("name", sorted({*ADVANTAGES} - {"token_returns"}))
@settings(max_examples=4, deadline=None)
@given(both=trajectories())
def test_rows_of_a_trajectory_change_nobodys_advantage(name: str, both: tuple[list[Rollout], list[Rollout]]):
    whole, cut = both
    assert by_turn(name, cut) == pytest.approx(by_turn(name, whole), abs=1e-5)


@pytest.mark.parametrize("rows", [True], ids=["stored"], indirect=True)
@pytest.mark.parametrize("name", sorted({*ADVANTAGES} - {"token_returns", "turn_returns"}))
def test_an_episode_that_was_given_up_changes_nobodys_advantage(name: str, rows: list[Rollout]):
    """Nor its rewards before: a group that was closed early has the baseline of those that had ended."""
    closed = [replace(each, group_size=3) for each in rows]
    indexes = {"request_index": 2, "group_index": 2, "group_size": 3}
    given_up = row("x", "ex", None, error=GROUP_CLOSED, trajectory_id="x", **indexes)
    turns = rows_of(given_up, [Turn(5.0, "start"), Turn(0.0, "k0")])
    turns = [replace(each, episode_reward=None, error=GROUP_CLOSED) for each in turns]
    found = by_turn(name, [*closed, *turns])
    assert {key: value for key, value in found.items() if key[0] != "x"} == pytest.approx(by_turn(name, rows))


# With several threads, rows reach an aggregate in any order, and a sum in another order has other last digits.
@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_order_of_rows_changes_no_bit_of_an_advantage(name: str):
    rng = np.random.default_rng(0)
    rows = family(rng.normal(size=(12, 3)).tolist(), splits=[(1,), (), ()] * 12)
    assert by_turn(name, [rows[i] for i in rng.permutation(len(rows))]) == by_turn(name, rows)


def test_the_rewards_of_peers_are_those_that_share_a_baseline(rows: list[Rollout], root: Root, store):
    group = RolloutGroup(key="g", rollouts=tuple(replace(each, group_id="g") for each in rows))
    batch = RolloutBatch(groups=(group,), metadata=RolloutMetadata(worker_id="worker"))
    store(to_table(batch, run_id="run", sequence=0))
    found = ludic.connect(root.url).sql("from rewards_of_peers").to_arrow_table().drop(["std"]).to_pylist()
    of_root = {"group_id": "g", "root": root.url, "lowest": 0.0}
    assert sorted(found, key=itemgetter("n")) == [
        {**of_root, "peers": "environment", "n": 2, "total": 1.0, "mean": 0.5, "rewards": [0.0, 1.0]},
        {**of_root, "peers": "solver, depth 1", "n": 4, "total": 1.5, "mean": MEAN, "rewards": [0.0, 0.0, 0.5, 1.0]},
    ]


# --- The record's own method, and noise --------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(both=trajectories(), has_ids=st.booleans(), failed=st.sets(st.integers(0, 11)))
def test_rloo_is_what_the_record_computes_for_parents_and_siblings(both, has_ids: bool, failed: set[int]):
    cut = both[1]
    if not has_ids:
        cut = [replace(each, trajectory_id=None) for each in cut]
    cut = [
        replace(each, episode_reward=None, error="failed") if index in failed else each
        for index, each in enumerate(cut)
    ]
    found = estimate("rloo", cut)
    wanted = RolloutGroup(key="g", rollouts=tuple(cut)).rloo_advantages()
    values = [found[each.rollout_id] for each in cut]
    assert [value is None for value in values] == [isnan(value) for value in wanted]
    assert [v for v in values if v is not None] == pytest.approx([w for w in wanted if not isnan(w)], abs=1e-9)


def test_noise_leaves_a_trajectory_without_peers_at_zero():
    a = row("a", "A", 1.0)
    rows = [a, child("k", a, 0.5), row("b", "B", 1.0)]
    found = estimate("rloo", rows, noise_scale=1e-3)
    assert found["k"] == 0
    assert all(0 < abs(found[name]) < 1e-2 for name in "ab")
    assert estimate("rloo", [a], noise_scale=1e-3) == {"a": 0}


# --- Lengths ------------------------------------------------------------------------------------------------


def test_opo_weighs_by_sampled_tokens_of_all_rows():
    # a sampled 2 tokens of 8, in rows of 1, b 4 of 4: (2 * 1 + 4 * 0) / 6
    sampled = np.array([True, False, False, False])
    parts = {
        "action_mask": sampled,
        "response_logprobs": np.zeros(4, np.float32),
        "token_rewards": np.zeros(4, np.float32),
    }
    tokens = np.ones(4, np.int32)
    rows = [
        row("a", "A", 1.0, response_tokens=tokens, **parts),
        row("a1", "A", 1.0, segment_index=1, response_tokens=tokens, **parts),
        row("b", "B", 0.0, response_tokens=tokens, **{**parts, "action_mask": None}),
    ]
    assert estimate("opo", rows) == pytest.approx({"a": 2 / 3, "a1": 2 / 3, "b": -1 / 3})
    # of 2 and 4 tokens, the shorter one is preferred by 1
    assert estimate("length_penalty", rows, length_weight=1.0) == pytest.approx({"a": 2, "a1": 2, "b": -2})


def test_siblings_that_are_alike_keep_their_own_rows():
    # k sampled 2 + 2 tokens and m 2, with equal rewards; n another 2 without one: 1 - 6/8
    a = row("a", "A", 1.0)
    one, nothing = Turn(1.0), Turn(0.0)
    rows = [
        *rows_of(a, [one]),
        *rows_of(child("k", a, 1.0), [one, nothing], [1]),
        *rows_of(child("m", a, 1.0), [one]),
        *rows_of(child("n", a, 0.0), [nothing]),
    ]
    quarter = {"a": 0, "k": 0.25, "k+1": 0.25, "m": 0.25, "n": -0.75}
    assert estimate("opo", rows) == pytest.approx(quarter)
    # by trajectory: 1 - (1 + 0)/2, and 0 - 1
    assert estimate("rloo", rows) == pytest.approx({"a": 0, "k": 0.5, "k+1": 0.5, "m": 0.5, "n": -1})


def test_a_sub_agent_of_its_parents_name_is_not_compared_with_it():
    a, b = row("a", "A", 1.0), row("b", "B", 0.0)
    rows = [a, child("k", a, 0.25, "main"), b, child("m", b, 0.75, "main")]
    for name in ("rloo", "child_credit"):
        assert estimate(name, rows, **PARAMS.get(name, {})) == {"a": 1, "b": -1, "k": -0.5, "m": 0.5}
