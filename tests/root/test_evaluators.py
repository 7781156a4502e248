"""Claims of blocks: one process at a time has a block, until it releases it, dies, or its lease is over."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ludic.root.claims import describe_process
from ludic.root.json_records import Evaluator, encode_record
from ludic.root.root import Root
from ludic.root.rows.evaluations import BlockClaims
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

BLOCK = "evals/version=0/env=addition/eval-0123456789abcdef-0.8-0.1-0.parquet"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return put_run(str(tmp_path / "run"), RunConfig(model="m", env=("addition",)))


OTHER = "evaluators/01929292-0000-7000-8000-000000000000.json"


def put(root: Root, process: str | None = None) -> None:
    """Put the file of a process that renews nothing."""
    found = Evaluator(owner="there-1", process=process, blocks=[BLOCK])
    root.put(OTHER, encode_record(found))


def test_a_block_belongs_to_one_process_until_it_releases_it(root: Root) -> None:
    with BlockClaims(root) as one, BlockClaims(root) as two:
        assert one.take(BLOCK)
        assert one.take("another")
        assert not two.take(BLOCK)
        assert two.of_others() == {BLOCK, "another"}
        assert one.of_others() == set()
        one.release(BLOCK)
        assert two.take(BLOCK)
        assert len(root.list("evaluators")) == 2
    assert root.list("evaluators") == []


def test_of_many_processes_at_once_at_most_one_has_a_block(root: Root) -> None:
    for number in range(5):
        claims = [BlockClaims(root) for _ in range(6)]
        start, taken = threading.Barrier(6), []

        def take(each: BlockClaims, start: threading.Barrier, taken: list[bool], block: str) -> None:
            start.wait()
            taken.append(each.take(block))

        threads = [threading.Thread(target=take, args=(each, start, taken, str(number))) for each in claims]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(taken) == 6
        assert sum(taken) <= 1
        for each in claims:
            each.__exit__(None, None, None)


def test_a_dead_process_claims_nothing(root: Root) -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child,
        BlockClaims(root) as claims,
    ):
        put(root, describe_process(child.pid))
        assert not claims.take(BLOCK)
        child.kill()
        child.wait()
        assert claims.take(BLOCK)
        assert OTHER not in root.list("evaluators")


def test_a_process_elsewhere_claims_nothing_once_its_lease_is_over(root: Root) -> None:
    put(root)
    with BlockClaims(root, lease_s=0.3) as claims:
        began = time.monotonic()
        while not claims.take(BLOCK):
            assert time.monotonic() < began + 30
        assert time.monotonic() >= began + 0.3


@pytest.mark.slow
def test_a_claim_is_renewed_while_its_process_works(root: Root) -> None:
    with BlockClaims(root, lease_s=3) as one, BlockClaims(root) as two:
        assert one.take(BLOCK)
        (name,) = root.list("evaluators")
        first = root.read(name)
        until = time.monotonic() + 30
        while root.read(name) == first:
            assert not two.take(BLOCK)
            assert time.monotonic() < until


def test_a_broken_file_claims_nothing(root: Root, caplog: pytest.LogCaptureFixture) -> None:
    root.put(OTHER, b"{}")
    with BlockClaims(root) as claims:
        assert claims.take(BLOCK)
        assert claims.take("another")
    assert len(caplog.messages) == 1
    assert f"{OTHER} is no list of an evaluation's open blocks" in caplog.text
