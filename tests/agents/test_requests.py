"""Seeds and indexes of the episodes of a group."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ludic.agents.requests import EpisodeRequest, derive_seed, repeat
from ludic.engines.engine import SamplingParams
from ludic.environments.environment import Example
from ludic.records.rollout import Message

EXAMPLE = Example(example_id="2+2", messages=(Message(role="user", content="what is 2 + 2"),))


def group_request(request_index: int = 0) -> EpisodeRequest:
    return EpisodeRequest(
        env_name="sums",
        example=EXAMPLE,
        params=SamplingParams(max_tokens=4),
        seed=5,
        group_id="group",
        request_index=request_index,
        purpose="eval",
    )


def test_repeat_counts_indexes_from_0_and_request_indexes_from_that_of_the_request() -> None:
    episodes = repeat(group_request(request_index=12), 3, seed=5)
    assert [(e.group_index, e.group_size, e.request_index) for e in episodes] == [(0, 3, 12), (1, 3, 13), (2, 3, 14)]
    for episode in episodes:
        assert (episode.group_id, episode.env_name, episode.purpose) == ("group", "sums", "eval")
        assert (episode.example, episode.params) == (EXAMPLE, SamplingParams(max_tokens=4))


@given(seed=st.integers(0, 2**63 - 1), n=st.integers(1, 64))
def test_repeat_gives_each_episode_a_seed_of_its_own_and_always_the_same(seed: int, n: int) -> None:
    seeds = [episode.seed for episode in repeat(group_request(), n, seed)]
    assert len(set(seeds)) == n
    assert seeds == [episode.seed for episode in repeat(group_request(), n, seed)]


@given(seed=st.integers(0, 2**63 - 1), n=st.integers(2, 16))
def test_a_larger_group_begins_with_the_seeds_of_a_smaller_one(seed: int, n: int) -> None:
    larger = [episode.seed for episode in repeat(group_request(), n, seed)]
    assert larger[: n - 1] == [episode.seed for episode in repeat(group_request(), n - 1, seed)]


@given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=4))
def test_a_derived_seed_fits_the_int64_column(parts: list[int]) -> None:
    assert 0 <= derive_seed(*parts) < 2**63


def test_derived_seeds_are_the_same_on_every_machine_and_in_every_version() -> None:
    # blake2b of "(0, 1)" to 8 bytes, big-endian, without its lowest bit:
    # python -c "import hashlib; print(hashlib.blake2b(b'(0, 1)', digest_size=8).hexdigest())"
    assert derive_seed(0, 1) == 0xEDC75A6672FD4BFA >> 1


def test_neighbours_get_seeds_that_share_about_half_of_their_bits() -> None:
    seeds = [derive_seed(0, index) for index in range(200)]
    differing = [(a ^ b).bit_count() for a, b in pairwise(seeds)]
    # 63 / 2 bits, with a standard error of sqrt(63 / 4 / 199) = 0.28.
    assert abs(sum(differing) / len(differing) - 31.5) < 1.5


def test_the_order_and_the_borders_of_the_parts_count() -> None:
    assert len({derive_seed(1, 23), derive_seed(12, 3), derive_seed(23, 1), derive_seed(123)}) == 4
