"""Seconds from the publish of a version to its first token, by the clocks of trainer and worker."""

import asyncio
import time
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from tiny_models import committed_rows

from ludic.engines.engine import Completion, GenerationRequest, SamplingParams, WeightSpan
from ludic.rollouts.weight_sync import SwapTimes
from ludic.root.catalogue import POLICIES
from ludic.root.json_records import Policy, encode_record
from ludic.root.rows.tables import MetricsTail
from ludic.root.weights.policies import read_policy


class Engine:
    """Answers at once with one token; says that it came `first_token_s` after the request."""

    policy_version, max_length = 3, 77

    def __init__(self, first_token_s: float | None) -> None:
        self._first_token_s = first_token_s

    async def generate(self, request: GenerationRequest) -> Completion:
        return Completion(
            tokens=np.array([1], np.int32),
            columns={"response_logprobs": np.zeros(1, np.float32)},
            finish_reason="length",
            weight_versions=(WeightSpan(version=3, start=0, end=1),),
            first_token_s=self._first_token_s,
        )

    def load_weights(self, folder: str, version: int) -> None:
        self.policy_version = version


def claim(root, seconds_ago: float) -> None:
    """Claim version 3 by the clock of a trainer."""
    created = datetime.now(UTC) - timedelta(seconds=seconds_ago)
    policy = Policy(version=3, step=0, attempt_id=1, parent_version=None, created_at=created.isoformat())
    root.put_if_absent(POLICIES.name_of(policy), encode_record(policy))


def times_after_two_requests(root, first_token_s: float | None) -> dict:
    times = SwapTimes(root)
    engine = times.watch(Engine(first_token_s))
    assert (engine.policy_version, engine.max_length) == (3, 77)
    for part in ("fetch", "load"):
        with times.measured(part):
            time.sleep(0.01)
    request = GenerationRequest(prompt_tokens=np.array([1], np.int32), params=SamplingParams(), seed=0)
    for _ in range(2):
        asyncio.run(engine.generate(request))
    found = times.take(3)
    assert times.take(3) == {}, "taken once"
    return found


@pytest.mark.parametrize(("waited", "expected"), [(2.0, 12.0), (None, 10.0)])
def test_the_first_token_counts_from_the_claim(root, waited, expected):
    claim(root, seconds_ago=10.0)
    found = times_after_two_requests(root, waited)
    assert found["first_token_s"] == pytest.approx(expected, abs=1.0)
    assert found["fetch_s"] >= 0.01
    assert found["load_s"] >= 0.01


def test_clocks_that_contradict_each_other_give_no_figure(root):
    claim(root, seconds_ago=-100.0)
    assert times_after_two_requests(root, 2.0)["first_token_s"] is None


def test_a_version_without_a_record_gives_no_figure(root):
    assert times_after_two_requests(root, 2.0)["first_token_s"] is None


def test_a_worker_logs_each_versions_times_once(root, folder, other_folder, working):
    import shutil

    from ludic.root.weights.policies import publish_policy

    def publish(source: str, groups: int) -> None:
        def save(target):
            shutil.copytree(source, target, dirs_exist_ok=True)

        publish_policy(root, save, step=0, attempt_id=1, parent_version=None, budget=groups)

    def num_groups(version: int) -> int:
        rows = committed_rows(root, "group_id", "policy_version")
        return len({row["group_id"] for row in rows if row["policy_version"] == version})

    with working(root, in_flight=2) as wait_until:
        publish(folder, 3)
        wait_until(lambda: num_groups(0) == 3)
        publish(other_folder, 5)
        wait_until(lambda: num_groups(1) == 2)
    rows = sorted(MetricsTail(root).poll(), key=lambda row: row["created_at"])
    timed = [row for row in rows if row["first_token_s"] is not None]
    assert [row["policy_version"] for row in timed] == [0, 1]
    assert sum(row["num_groups"] for row in rows) == 5
    for row in timed:
        assert 0 < row["load_s"] < row["first_token_s"] < 60
    assert read_policy(root, 1) is not None
