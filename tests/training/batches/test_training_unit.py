"""Sequences of whole rows and of single turns: the same tokens, and the same gradient for the same credit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from strategies import changed, make_group
from tiny_models import whole
from tiny_runs import fill, train_config
from transformers import AutoModelForCausalLM

from ludic.errors import ConfigError
from ludic.records.columns import Ragged
from ludic.records.rollout import RolloutBatch, RolloutMetadata
from ludic.records.validation import Routing
from ludic.root.rows.reader import RolloutReader
from ludic.root.rows.writer import RolloutWriter
from ludic.root.sql.planner import BatchRules, Planner
from ludic.training.batches.packing import Sequences, TrainingSequence, cut_out
from ludic.training.batches.reading import read_rank_batch
from ludic.training.batches.source import BatchPlan
from ludic.training.model import shard
from ludic.training.step import train_step


def test_a_part_has_all_that_came_before_it_in_its_prompt() -> None:
    row = TrainingSequence(
        rollout_id="a",
        prompt_tokens=np.array([1, 2], np.int32),
        response_tokens=np.array([3, 4, 5, 6, 7], np.int32),
        columns={
            "response_logprobs": np.array([-0.3, -0.4, 0, -0.6, -0.7], np.float32),
            "action_mask": np.array([1, 1, 0, 1, 1], bool),
        },
        advantage=np.array([3, 4, 5, 6, 7], np.float32),
        weight=0.5,
    )
    parts = cut_out(Sequences.of([row]), np.array([0, 0]), np.array([0, 3]), np.array([2, 5]))
    assert [tokens.tolist() for tokens in parts.prompt_tokens] == [[1, 2], [1, 2, 3, 4, 5]]
    assert [tokens.tolist() for tokens in parts.response_tokens] == [[3, 4], [6, 7]]
    assert [values.tolist() for values in parts.advantage] == [[3, 4], [6, 7]]
    assert [mask.tolist() for mask in parts.columns["action_mask"]] == [[True, True], [True, True]]
    assert (parts.rollout_id, parts.weight) == (["a", "a"], [0.5, 0.5])


def gradient_of(root, batch, mesh, **settings) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(root.record.model, dtype=torch.float32)
    shard(model, mesh)
    seen: dict[str, torch.Tensor] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(
        lambda *_: seen.update({n: whole(p.grad).clone() for n, p in model.named_parameters()})
    )
    train_step(
        model,
        optimizer,
        batch.micro_batches,
        config=train_config(max_grad_norm=None, **settings),
        num_action_tokens=batch.num_action_tokens,
        num_ranks=1,
        learning_rate=0.1,
    )
    return seen


@pytest.fixture
def read(new_root, open_stream):
    """read(unit, num_ranks): what each rank reads of the same plan."""
    root = new_root(groups_per_batch=4)
    fill(root, num_files=2, groups_per_file=2, num_turns=3, response_length=21)
    plan = open_stream(root, offline=True).next_batch().plan

    def read_(unit, num_ranks=1, **settings):
        config = train_config(training_unit=unit, **settings).batch
        return root, [read_rank_batch(root, config, plan, rank, num_ranks) for rank in range(num_ranks)]

    return read_


@pytest.mark.parametrize("objective", ["reinforce", "ppo_clip"])
def test_both_units_give_the_same_gradient(read, mesh, objective) -> None:
    settings = {"objective": objective} | ({"clip_low": 0.2, "clip_high": 0.2} if objective == "ppo_clip" else {})
    root, (episodes,) = read("episode")
    _, (turns,) = read("turn")
    assert turns.num_action_tokens == episodes.num_action_tokens
    assert turns.num_tokens > episodes.num_tokens  # what came before a turn is read again
    expected, found = (gradient_of(root, batch, mesh, **settings) for batch in (episodes, turns))
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    assert largest > 0
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=0, atol=1e-5 * largest), name


def test_ranks_share_the_turns(read) -> None:
    _, (alone,) = read("turn", max_tokens_per_micro_batch=64)
    _, ranks = read("turn", 2, max_tokens_per_micro_batch=64)
    assert len(ranks[0].micro_batches) == len(ranks[1].micro_batches) > 1
    assert sum(rank.num_action_tokens for rank in ranks) == alone.num_action_tokens

    def targets(batches):
        return sorted(
            (micro_batch.targets.tolist(), micro_batch.advantages.tolist())
            for micro_batch in batches
            if micro_batch.rollout_ids
        )

    def tokens(batches):
        return sorted(pair for found in targets(batches) for pair in zip(*found, strict=True))

    assert tokens([m for rank in ranks for m in rank.micro_batches]) == tokens(alone.micro_batches)


def test_a_turn_is_cut_at_max_seq_len(read) -> None:
    _, (whole_turns,) = read("turn")
    _, (cut,) = read("turn", max_seq_len=16)
    assert 0 < cut.num_truncated < 3 * 16
    assert cut.num_action_tokens < whole_turns.num_action_tokens


def test_every_array_of_a_turn_comes_from_the_file_with_its_tokens(new_root) -> None:
    root = new_root(group_size=2, keep_experts=True)
    group = make_group(rewards=[1.0, 0.0], response_length=5)
    both = {"prompt_tokens": ids(1, 2), "response_logprobs": np.array([-3, -4, 0, -6, -7], np.float32)}
    chosen = np.array([[[10 * token, 10 * token + 1]] for token in range(1, 7)], np.int16)  # of 1 to 6, which are read
    first = changed(
        group.rollouts[0],
        **both,
        response_tokens=ids(3, 4, 5, 6, 7),
        action_mask=np.array([1, 1, 0, 1, 1], bool),
        kept_tokens=Ragged.of([[3, 9], [4], [], [6], [7, 8]], np.int32),
        experts=chosen,
    )
    second = changed(group.rollouts[1], **both | {"response_logprobs": np.full(5, -0.5, np.float32)})
    with RolloutWriter(root, "w0") as writer:
        metadata = RolloutMetadata(worker_id="w0")
        writer.append(RolloutBatch(groups=(replace(group, rollouts=(first, second)),), metadata=metadata))
    planner = Planner(BatchRules(advantage="rloo", groups_per_batch=1))
    planner.add(RolloutReader(root, planner.columns).poll(None))
    rows = planner.plan(step=1, attempt_id=1, trainer_version=0)
    plan = BatchPlan(step=1, rows=rows, cursor={}, num_pending_groups=0, num_unreadable_files=0)
    # The second turn begins after 1 to 5; the limit leaves its first token, 6. One micro-batch a sequence.
    config = train_config(training_unit="turn", max_seq_len=6, max_tokens_per_micro_batch=6).batch
    routing = Routing(layers=(0,), chosen=2, num_experts=64)
    found = {
        tuple(batch.targets.tolist()): batch
        for batch in read_rank_batch(root, config, plan, 0, 1, routing=routing).micro_batches
        if first.rollout_id in batch.rollout_ids
    }
    assert found.keys() == {(3, 4), (6,)}
    one, other = found[3, 4], found[(6,)]
    assert [batch.input_ids.tolist() for batch in (one, other)] == [[[1, 2, 3]], [[1, 2, 3, 4, 5]]]
    assert [batch.sampler_logprobs.tolist() for batch in (one, other)] == [[-3, -4], [-6]]
    assert [batch.advantages.tolist() for batch in (one, other)] == [[1, 1], [1]]  # 1 over the other's 0
    assert [batch.experts[:, 0, 0].tolist() for batch in (one, other)] == [[10, 20, 30], [10, 20, 30, 40, 50]]
    assert [batch.kept_tokens.values.tolist() for batch in (one, other)] == [[3, 9, 4], [6]]
    assert one.kept_tokens.bounds.tolist() == [0, 2, 3]


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"keep_token_stats": True}, "keep_token_stats"),
        ({"objective": "dpo", "loss_normalization": "sequences", "reference": "base"}, "objective dpo"),
        ({"loss_normalization": "episodes"}, "loss_normalization episodes"),
    ],
)
def test_settings_that_need_whole_rows_are_refused(settings, name) -> None:
    with pytest.raises(ConfigError, match=f"training_unit is turn, and {name} looks at whole rows"):
        train_config(training_unit="turn", **settings)
