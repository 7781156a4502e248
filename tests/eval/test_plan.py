"""Which examples and samples an evaluation plans."""

from pathlib import Path
from typing import Any

import pytest

from ludic.environments.registry import make_environment
from ludic.errors import ConfigError
from ludic.eval.config import EvalConfig, parse_versions
from ludic.eval.plan import environment_settings, heldout_examples, missing_blocks, sampling_params, settings_of
from ludic.root.rows.evaluations import SampleBlock, evaluation_of
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run, run_of
from ludic.settings.table import arguments


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


RUN = RunConfig(
    model="m",
    env=("addition", "opposites"),
    env_options={"addition": {"digits": 2}},
    temperature=0.7,
    top_k=5,
    max_tokens=32,
    tool_format="hermes",  # the default of before, which run.json of then holds
    parser="boxed",
    tools=("calculator",),
    max_steps=4,
    seed=3,
)
EVERY_OVERRIDE: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "max_tokens": 8,
    "accept_incomplete": True,
    "max_steps": 2,
    "max_sequence_tokens": 64,
    "parser": "whole",
    "format_reward": 0.25,
    "context": "window:2",
    "tools": (),
    "tool_format": "json",
    "protocol": "single_agent",
    "seed": 11,
}


@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        # as versions before 2026-11-26 computed them: stored samples are found by these
        ({}, ["bb222d738e31a62d", "fec4ff4b46e5f0fd"]),
        ({"temperature": 0}, ["06a55388e599ccd9", "cd65e5747d5e4ee1"]),
        ({"temperature": 0.0}, ["226af4a91e71bc84", "a46bea6efef76e1b"]),
        (EVERY_OVERRIDE, ["6cb68801b918dbb5", "ad21ebd09c60f0d8"]),
        (
            {
                "env": ("addition",),
                "env_options": {"addition": {"digits": 3}},
                "accept_incomplete": False,
                "tools": ["python"],
            },
            ["91597cf13de3ae68"],
        ),
    ],
)
def test_the_id_of_an_evaluation_follows_from_its_settings(
    tmp_path: Path, settings: dict[str, Any], ids: list[str]
) -> None:
    root = put_run(str(tmp_path / "run"), RUN)
    config = EvalConfig(**arguments(EvalConfig, settings))
    found = [
        evaluation_of(run.env[0], settings_of(run, sampling_params(run_of(root), config)), [])
        for run in environment_settings(root, config)
    ]
    assert [each.evaluation for each in found] == ids
