"""Which examples and samples an evaluation plans."""

import pytest

from ludic.environments.registry import make_environment
from ludic.errors import ConfigError
from ludic.eval.config import parse_versions
from ludic.eval.plan import heldout_examples, missing_blocks
from ludic.store.evaluations import SampleBlock


def test_an_environment_with_few_examples_gives_each_once(caplog: pytest.LogCaptureFixture) -> None:
    make = make_environment("opposites")
    found = heldout_examples("opposites", make, 1000)
    ids = [example.example_id for example in found.values()]
    assert len(set(ids)) == len(ids) < 1000
    assert f"environment opposites has {len(ids)} held-out examples, not 1000" in caplog.text


def test_blocks_cover_what_is_missing_and_nothing_else() -> None:
    def block(examples: range, samples: range) -> SampleBlock:
        return SampleBlock(evaluation="0" * 16, examples=examples, samples=samples)

    def missing(examples: list[int], n: int, stored: list[SampleBlock]) -> list[tuple[range, range]]:
        blocks = missing_blocks("0" * 16, examples, n, stored, 3)
        return [(each.examples, each.samples) for each in blocks]

    # Index 2 repeats an earlier example, so it is not among the examples.
    assert missing([0, 1, 3, 4, 5], 2, []) == [(range(4), range(2)), (range(4, 6), range(2))]
    assert missing([0, 1, 3, 4, 5], 2, [block(range(4), range(2))]) == [(range(4, 6), range(2))]
    assert missing([0, 1, 3], 4, [block(range(1, 4), range(1, 3))]) == [
        (range(1), range(4)),
        (range(1, 4), range(1)),
        (range(1, 4), range(3, 4)),
    ]


def test_a_block_is_known_by_its_name() -> None:
    block = SampleBlock(evaluation="0123456789abcdef", examples=range(3, 8), samples=range(2))
    assert block.worker_id == "eval-0123456789abcdef-3.8-0.2"
    assert SampleBlock.parse(block.worker_id) == block
    assert SampleBlock.parse("w0-host-1") is None


def test_versions_are_numbers_ranges_and_latest() -> None:
    assert parse_versions("0, 10,latest,20-30,40-latest") == [0, 10, "latest", (20, 30), (40, "latest")]


@pytest.mark.parametrize("text", ["", "-1", "1.5", "1-", "latest-3", "0,,1", "١"])
def test_other_versions_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="wanted a number, latest, or a range"):
        parse_versions(text)
