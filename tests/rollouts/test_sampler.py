"""From group numbers to groups: the same in every life of every worker."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from line_counts import counted_lines

import ludic.rollouts.sampler
from ludic.agents.agent import Agent
from ludic.agents.requests import EpisodeRequest
from ludic.engines.engine import Completion, Engine, GenerationRequest
from ludic.engines.transformers_engine import TransformersEngine
from ludic.environments.environment import Example
from ludic.environments.limits import LimitedEnvironments
from ludic.environments.registry import EnvironmentFactory
from ludic.errors import ConfigError
from ludic.models.chat import load_tokenizer
from ludic.records.rollout import Message, Rollout, RolloutGroup, new_id
from ludic.records.validation import validate
from ludic.rollouts.sampler import GroupSampler, TurnOrder
from ludic.run.config import RunConfig

MakeSampler = Callable[..., GroupSampler]


@pytest.fixture(scope="module")
def agent(folder: str) -> Agent:
    engine = TransformersEngine(folder, device="cpu")
    return Agent(engine=engine, tokenizer=load_tokenizer(folder), model=folder)


@pytest.fixture
def make_sampler(agent: Agent, run_config: Callable[..., RunConfig]) -> MakeSampler:
    return lambda **options: GroupSampler.of_run(run_config(**options), agent)


def sample(sampler: GroupSampler, *numbers: int) -> tuple[RolloutGroup, ...]:
    batch = sampler.sample(numbers, "w0-test")
    validate(batch)
    return batch.groups


def envs_of(groups: Sequence[RolloutGroup]) -> list[str]:
    return [group.rollouts[0].env_name for group in groups]


def tokens_of(group: RolloutGroup) -> list[list[int]]:
    return [[*rollout.prompt_tokens.tolist(), *rollout.response_tokens.tolist()] for rollout in group.rollouts]


def test_environments_are_served_in_turn(make_sampler: MakeSampler) -> None:
    groups = sample(make_sampler(env=("addition", "opposites")), *range(4))
    assert envs_of(groups) == ["addition", "opposites", "addition", "opposites"]


def test_each_environment_goes_through_its_examples_one_by_one(make_sampler: MakeSampler) -> None:
    sampler = make_sampler(env=("addition", "opposites"))
    addition = sampler.environments["addition"]()
    expected = [addition.example(index, "train").example_id for index in range(4)]
    groups = sample(sampler, *range(8))
    assert [group.rollouts[0].env_example_id for group in groups[::2]] == expected


def test_an_environment_named_twice_gets_twice_as_many_groups_and_still_one_example_each(
    make_sampler: MakeSampler,
) -> None:
    sampler = make_sampler(env=("addition", "opposites", "addition"))
    addition = sampler.environments["addition"]()
    groups = sample(sampler, *range(6))
    assert envs_of(groups) == ["addition", "opposites", "addition"] * 2
    examples = [groups[number].rollouts[0].env_example_id for number in (0, 2, 3, 5)]
    assert examples == [addition.example(index, "train").example_id for index in range(4)]


def test_a_curriculum_lets_environments_join_and_leaves_out_no_example(make_sampler: MakeSampler) -> None:
    envs = ("addition", "opposites", "number_comparison")
    sampler = make_sampler(env=envs, curriculum=3)
    names, indexes = zip(*map(sampler.turns.of, range(13)), strict=True)
    assert names[:3] == ("addition",) * 3
    assert names[3:6] == ("opposites", "addition", "opposites")  # numbers go on: 3 % 2 is 1
    assert names[6:] == tuple(envs[number % 3] for number in range(6, 13))
    for name in envs:
        of_env = [index for index, env in zip(indexes, names, strict=True) if env == name]
        assert of_env == list(range(len(of_env)))


def turns_one_by_one(envs: Sequence[str], curriculum: int | None, num_groups: int) -> list[tuple[str, int]]:
    """The environment of each group and the number of its earlier groups, counted group by group."""
    counts: Counter[str] = Counter()
    turns = []
    for number in range(num_groups):
        num_envs = len(envs) if curriculum is None else min(1 + number // curriculum, len(envs))
        name = envs[number % num_envs]
        turns.append((name, counts[name]))
        counts[name] += 1
    return turns


@given(
    envs=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=12),
    curriculum=st.none() | st.integers(1, 30),
    num_groups=st.integers(1, 300),
    chance=st.randoms(use_true_random=False),
)
def test_turns_are_those_that_are_counted_group_by_group_in_whatever_order_they_are_asked_for(
    envs: list[str], curriculum: int | None, num_groups: int, chance: Random
) -> None:
    expected = turns_one_by_one(envs, curriculum, num_groups)
    turns, numbers = TurnOrder(envs, curriculum), list(range(num_groups))
    assert [turns.of(number) for number in numbers] == expected
    chance.shuffle(numbers)
    assert [turns.of(number) for number in numbers] == [expected[number] for number in numbers]


class Names(tuple[str, ...]):
    """Names of environments, whose reads are counted."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        type(self).num_read += len(found) if isinstance(index, slice) else 1
        return Names(found) if isinstance(index, slice) else found

    def __iter__(self) -> Iterator[str]:
        type(self).num_read += len(self)
        return super().__iter__()

    def count(self, value: Any) -> int:
        type(self).num_read += len(self)
        return super().count(value)


class Plain:
    def example(self, index: int, split: str) -> Example:
        return Example(example_id=str(index), messages=(Message(role="user", content="?"),))


def most_work(config: RunConfig) -> tuple[int, int]:
    """Most lines that a group takes, and most names: of groups in all stages, each the first of its sampler."""
    num_envs, environments = len(config.env), LimitedEnvironments("own", Plain)
    object.__setattr__(config, "env", Names(config.env))
    found = []
    for number in range(0, 8 * num_envs, num_envs // 25):
        sampler = GroupSampler(run=config, run_episode=unplayed, environments=dict.fromkeys(config.env, environments))
        Names.num_read = 0
        with counted_lines(ludic.rollouts.sampler) as lines:
            sampler.request(number)
        found.append((lines.num, Names.num_read))
    num_lines, num_read = zip(*found, strict=True)
    return max(num_lines), max(num_read)


async def unplayed(environments: object, request: object) -> Sequence[Rollout]:
    raise NotImplementedError


def test_the_work_of_a_group_does_not_grow_with_the_number_of_environments(
    run_config: Callable[..., RunConfig],
) -> None:
    few, many = (most_work(run_config(env=tuple(map(str, range(num))), curriculum=7)) for num in (50, 1000))
    assert many <= few
    assert few[1] == 1


def test_a_sweep_gives_the_episodes_of_a_group_settings_in_turn(make_sampler: MakeSampler) -> None:
    sampler = make_sampler(group_size=5, sweep={"temperature": [0.5, 1.5], "top_k": [3, None]})
    (group,) = sample(sampler, 0)
    assert [(rollout.temperature, rollout.top_k) for rollout in group.rollouts] == [
        (0.5, 3),
        (0.5, None),
        (1.5, 3),
        (1.5, None),
        (0.5, 3),
    ]
    plain = sample(make_sampler(group_size=5), 0)[0]
    assert [rollout.seed for rollout in group.rollouts] == [rollout.seed for rollout in plain.rollouts]


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"temprature": [1.0]}, "sweep has 'temprature', wanted temperature, top_p, top_k, max_tokens"),
        ({"temperature": 1.0}, r"sweep has temperature = 1.0, wanted a list of values"),
        ({"temperature": []}, "wanted a list of values"),
        ({"temperature": [1.0, 0]}, "sweep: temperature is 0; training needs a number above 0"),
        ({"top_p": [2.0]}, "sweep: top_p is 2.0, wanted at most 1"),
        ({"max_tokens": ["long"]}, "sweep: max_tokens is 'long', wanted a whole number"),
    ],
)
def test_a_wrong_sweep_is_refused(run_config: Callable[..., RunConfig], sweep: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config(sweep=sweep)


@dataclass
class Counting:
    """An engine that counts what it is asked for."""

    engine: Engine
    requests: list[GenerationRequest] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def repeats_in_any_batch(self) -> bool:
        return self.engine.repeats_in_any_batch

    @property
    def policy_version(self) -> int:
        return self.engine.policy_version

    @property
    def max_length(self) -> int:
        return self.engine.max_length

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        return await self.engine.generate(request)


def test_each_episode_of_one_step_is_one_request(agent: Agent, run_config: Callable[..., RunConfig]) -> None:
    engine = Counting(agent.engine)
    run = run_config(env=("addition", "opposites", "addition"), group_size=2)
    sample(GroupSampler.of_run(run, replace(agent, engine=engine)), *range(6))
    assert len(engine.requests) == len({request.seed for request in engine.requests}) == 12


def test_groups_come_in_the_order_of_their_numbers(make_sampler: MakeSampler) -> None:
    groups = sample(make_sampler(env=("addition", "opposites"), group_size=3), 7, 2, 5)
    assert [[rollout.request_index for rollout in group.rollouts] for group in groups] == [
        [21, 22, 23],
        [6, 7, 8],
        [15, 16, 17],
    ]


def test_a_group_is_one_example_sampled_with_as_many_seeds(make_sampler: MakeSampler) -> None:
    (group,) = sample(make_sampler(group_size=4), 3)
    assert {rollout.env_example_id for rollout in group.rollouts} == {group.rollouts[0].env_example_id}
    assert len({tuple(rollout.prompt_tokens.tolist()) for rollout in group.rollouts}) == 1
    assert len({rollout.seed for rollout in group.rollouts}) == 4
    assert len({tuple(tokens) for tokens in tokens_of(group)}) == 4
    assert [rollout.group_index for rollout in group.rollouts] == [0, 1, 2, 3]


def test_a_groups_key_names_environment_and_example(make_sampler: MakeSampler) -> None:
    sampler = make_sampler()
    (group,) = sample(sampler, 0)
    assert group.key == f"addition/{sampler.environments['addition']().example(0, 'train').example_id}"


def test_a_group_number_means_the_same_tokens_in_every_life_and_in_any_company(make_sampler: MakeSampler) -> None:
    one_life, another = make_sampler(), make_sampler()
    together = sample(one_life, 4, 5, 6)
    (alone,) = sample(another, 5)
    assert tokens_of(together[1]) == tokens_of(alone)
    for first, second in zip(together[1].rollouts, alone.rollouts, strict=True):
        assert first.response_logprobs == pytest.approx(second.response_logprobs, abs=1e-5)


def test_lives_never_share_ids(make_sampler: MakeSampler) -> None:
    (one,), (another,) = sample(make_sampler(), 5), sample(make_sampler(), 5)
    assert one.rollouts[0].group_id != another.rollouts[0].group_id
    assert one.rollouts[0].rollout_id != another.rollouts[0].rollout_id


def test_another_seed_of_the_run_gives_other_examples_and_other_answers(make_sampler: MakeSampler) -> None:
    (one,), (other,) = sample(make_sampler(), 0), sample(make_sampler(seed=1), 0)
    assert one.key != other.key
    assert {rollout.seed for rollout in one.rollouts}.isdisjoint(rollout.seed for rollout in other.rollouts)


def test_the_runs_sampling_parameters_are_used_and_stored(make_sampler: MakeSampler) -> None:
    (group,) = sample(make_sampler(temperature=0.5, top_p=0.9, top_k=1, max_tokens=3), 0)
    first, second = group.rollouts
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens) == (0.5, 0.9, 1, 3)
    # With one token to choose from, both are sure of it.
    assert tokens_of(group)[0] == tokens_of(group)[1]
    assert np.array_equal(second.response_logprobs, np.zeros(second.response_length))


def test_whether_incomplete_answers_are_accepted_is_up_to_the_run(make_sampler: MakeSampler) -> None:
    (refused,) = sample(make_sampler(max_tokens=1), 0)
    (accepted,) = sample(make_sampler(max_tokens=1, accept_incomplete=True), 0)
    assert [rollout.parse_error for rollout in refused.rollouts] == [True, True]
    assert [rollout.parse_error for rollout in accepted.rollouts] == [False, False]


def test_environment_options_reach_the_environment_that_they_name(make_sampler: MakeSampler) -> None:
    sampler = make_sampler(env=("addition", "opposites"), env_options={"addition": {"max_digits": 1}})
    operands = [
        int(text) for group in sample(sampler, 0, 2, 4, 6) for text in group.key.removeprefix("addition/").split("+")
    ]
    assert all(0 <= operand <= 9 for operand in operands)


def test_evaluation_samples_held_out_examples_and_says_so(make_sampler: MakeSampler) -> None:
    sampler = make_sampler()
    heldout = sampler.sample(range(30), "w0-test", split="heldout").groups
    train = {sampler.request(number).example.example_id for number in range(200)}
    assert train.isdisjoint(rollout.env_example_id for group in heldout for rollout in group.rollouts)
    assert {rollout.purpose for group in heldout for rollout in group.rollouts} == {"eval"}


def test_numbers_of_a_slot_far_beyond_the_run_are_sampled_like_any_other(make_sampler: MakeSampler) -> None:
    number = 2**52
    (group,) = sample(make_sampler(env=("addition", "opposites")), number)
    assert [rollout.request_index for rollout in group.rollouts] == [2 * number, 2 * number + 1]


def test_episodes_of_several_rows_and_agents_are_grouped_by_their_requests(make_sampler: MakeSampler) -> None:
    """Two agents each answer; the first one's row is continued in a second row in every other episode."""
    sampler = make_sampler(env=("addition", "opposites"), group_size=3)

    async def run_episode(make: EnvironmentFactory, request: EpisodeRequest) -> list[Rollout]:
        (answer,) = await sampler.run_episode(make, request)
        return rows_of(answer, continued=bool(answer.request_index % 2))

    def rows_of(answer: Rollout, *, continued: bool) -> list[Rollout]:
        names = [("solver", 0), ("solver", 1), ("critic", 0)] if continued else [("solver", 0), ("critic", 0)]
        return [replace(answer, rollout_id=new_id(), agent_id=agent, segment_index=at) for agent, at in names]

    groups = sample(replace(sampler, run_episode=run_episode), 3, 0, 2)
    assert [[(row.request_index, row.agent_id, row.segment_index) for row in group.rollouts] for group in groups] == [
        [
            *[(9, "solver", 0), (9, "solver", 1), (9, "critic", 0)],
            *[(10, "solver", 0), (10, "critic", 0)],
            *[(11, "solver", 0), (11, "solver", 1), (11, "critic", 0)],
        ],
        [
            *[(0, "solver", 0), (0, "critic", 0)],
            *[(1, "solver", 0), (1, "solver", 1), (1, "critic", 0)],
            *[(2, "solver", 0), (2, "critic", 0)],
        ],
        [
            *[(6, "solver", 0), (6, "critic", 0)],
            *[(7, "solver", 0), (7, "solver", 1), (7, "critic", 0)],
            *[(8, "solver", 0), (8, "critic", 0)],
        ],
    ]
    assert [len({row.group_id for row in group.rollouts}) for group in groups] == [1, 1, 1]
    assert [len({row.episode_id for row in group.rollouts}) for group in groups] == [3, 3, 3]


def test_an_unknown_environment_is_an_error_before_anything_is_sampled(make_sampler: MakeSampler) -> None:
    with pytest.raises(ConfigError, match="did you mean 'addition'"):
        make_sampler(env=("adition",))
