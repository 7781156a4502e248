"""Stats: what is counted in a root."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ludic.app.show.stats import collect_stats
from ludic.root.root import Root
from ludic.root.rows.files import list_files


@pytest.mark.slow
def test_a_run_is_counted(trained: Root) -> None:
    stats = collect_stats(trained).facts
    totals = stats["rollouts"]
    assert (totals["num_rollouts"], totals["num_groups"], totals["num_errors"]) == (16, 4, 1)
    assert (totals["num_prompt_tokens"], totals["num_response_tokens"]) == (16 * 8, 16 * 16)
    files = list_files(trained)
    assert stats["folders"]["rollouts"]["num_files"] == len(files) == 2
    size_bytes = sum(Path(trained.path, file.name).stat().st_size for file in files)
    assert stats["folders"]["rollouts"]["size_bytes"] == size_bytes
    assert totals["bytes_per_response_token"] == size_bytes / 256


def test_rewards_are_averaged_by_version_and_environment(trained: Root) -> None:
    stats = collect_stats(trained).facts
    assert [(row["version"], row["num_groups"], row["reward_mean"]) for row in stats["versions"]] == [
        (0, 2, pytest.approx((1 + 0 + 0.5 + 0.5 + 4 * 0.25) / 8)),
        (1, 2, pytest.approx((1 + 1 + 1) / 7)),  # one of eight is not scored
    ]
    assert [(row["env_name"], row["num_rollouts"]) for row in stats["environments"]] == [("moar_cats", 16)]
    assert stats["versions"][1]["error_fraction"] == 1 / 8


def test_training_is_counted_with_what_was_dropped_and_why(trained: Root) -> None:
    stats = collect_stats(trained).facts
    assert stats["steps"]["last_step"] == 1
    assert stats["steps"]["num_used"] == 8
    assert stats["steps"]["drops"] == {"drop_zero_variance_groups": 4}
    assert stats["checkpoints"] == ["checkpoints/attempt=1/step=1"]
    assert [(row["attempt_id"], row["on_chain"]) for row in stats["attempts"]] == [(1, True)]
    # The first weights, and those after the step.
    assert stats["policies"] == {"num_versions": 2, "num_stored": 2, "newest_stored": 1}
    assert stats["unreadable"] == []


@pytest.mark.slow
def test_a_run_is_the_same_on_every_filesystem(
    root_url: str, make_trained: Callable[[str], Root], trained: Root
) -> None:
    there, here = collect_stats(make_trained(root_url)).facts, collect_stats(trained).facts
    for key in ("environments", "versions"):
        assert there[key] == here[key]
    assert there["steps"] == here["steps"]
    assert there["folders"]["rollouts"]["num_rows"] == 16
