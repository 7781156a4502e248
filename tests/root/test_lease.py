"""Who owns a root: claims that only one can win, leases that show who lives, and starts that wait for no dead owner."""

import os
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
from filesystems import Fault, FaultyFileSystem, SharedStorage
from fsspec.implementations.memory import MemoryFileSystem

from ludic.base.defaults import MOST_LEASE_S
from ludic.errors import OwnedError, SchemaError
from ludic.root.attempts import start_attempt
from ludic.root.catalogue import LEASES, AttemptName
from ludic.root.claims import LeaseWatch, await_free, claim, describe_process, held, is_dead, newest_claim, read_lease
from ludic.root.json_records import Lease, encode_record
from ludic.root.root import Root
from ludic.run.run_json import put_run

LEASE_S = 0.6


@contextmanager
def owner(root: Root, after: int = 0, lease_s: float = LEASE_S):
    """A trainer that lives; yields its lease and the event that is set when it is fenced."""
    lease, fenced = claim(root, after, lease_s=lease_s), threading.Event()
    with held(root, lease, on_fenced=fenced.set, also=lambda: None):
        yield lease, fenced


def wait_until(is_so) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def watch(root: Root) -> int | None:
    return await_free(root, threading.Event())


def test_a_claim_is_won_by_one(root):
    def try_to_claim(_) -> Lease | OwnedError:
        try:
            return claim(root, 0)
        except OwnedError as error:
            return error

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(try_to_claim, range(4)))
    assert [type(result) for result in results].count(Lease) == 1
    assert newest_claim(root) == 1


def test_a_root_that_nobody_claimed_is_free(root):
    assert watch(root) == 0


@pytest.mark.slow
def test_a_root_is_refused_while_its_owner_renews_and_free_as_soon_as_it_lets_go(root, caplog):
    with owner(root, lease_s=3.0) as (lease, _):
        refusal = rf"attempt 1 of {lease.owner} trains here since {lease.since[:-6]}.* start with --take-over"
        with pytest.raises(OwnedError, match=refusal):
            watch(root)
    assert read_lease(root, 1).released
    caplog.clear()
    assert watch(root) == 1
    assert "has not released its lease" not in caplog.text


def test_a_claim_that_was_just_lost_names_the_winner(root):
    winner = claim(root, 0)
    with pytest.raises(OwnedError, match=rf"attempt 1 of {winner.owner} trains here since"):
        claim(root, 0)


@pytest.mark.slow
def test_an_owner_that_shows_no_life_for_a_lease_is_over(root, caplog):
    claim(root, 0, lease_s=LEASE_S)  # by this process, which lives, but does not renew
    began = time.monotonic()
    assert watch(root) == 1
    assert time.monotonic() - began >= LEASE_S
    assert "has not released its lease; watching it for 1 s to see whether it is alive" in caplog.text


def test_an_owner_that_lets_go_while_it_is_watched_is_over_at_once(root):
    lease = claim(root, 0, lease_s=6.0)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(watch, root)
        root.put(LEASES.name(AttemptName(1)), encode_record(replace(lease, released=True)))
        assert found.result(timeout=30) == 1


def test_a_watch_ends_when_told_to_stop(root):
    claim(root, 0, lease_s=60.0)
    stop = threading.Event()
    stop.set()
    assert await_free(root, stop) is None


def test_an_attempt_without_a_lease_is_replaced_without_a_wait(root):
    start_attempt(root)
    root.put("attempts/2.json", b"{}")  # of a ludic that had no leases
    assert watch(root) == 2
    assert claim(root, 2).attempt_id == 3


def test_a_file_that_is_no_lease_is_named(root):
    root.put("attempts/1.lease", b'{"attempt_id": 1')
    with pytest.raises(SchemaError, match=r"attempts/1\.lease is no lease .*; see that no trainer runs, and delete it"):
        watch(root)
    root.delete("attempts/1.lease")
    assert watch(root) == 0


def test_a_listing_that_misses_the_newest_claims_is_made_up_for(run_config):
    root = put_run(f"memory://{uuid.uuid4()}", run_config, fs=FaultyFileSystem(SharedStorage(MemoryFileSystem())))
    for after in range(4):
        claim(root, after)
    root.fs.faults.append(Fault.STALE)  # without the newest three
    assert newest_claim(root) == 4
    assert root.fs.storage.injected == {Fault.STALE: 1}


def test_an_owner_that_is_fenced_learns_it_from_its_lease_and_leaves_it(root):
    with owner(root) as (_, fenced):
        claim(root, 1)
        assert fenced.wait(30)
    assert not read_lease(root, 1).released


@pytest.mark.slow
def test_a_filesystem_that_fails_for_a_while_ends_no_lease(unreliable_root, caplog):
    root = unreliable_root
    with owner(root) as (lease, fenced):
        root.fs.failures_before += [OSError("down")] * 3
        wait_until(lambda: read_lease(root, 1).num_renewals >= 2)
        assert not fenced.is_set()
    assert caplog.text.count("the lease of attempt 1 could not be renewed, trying again") == 3
    assert read_lease(root, 1) == replace(lease, num_renewals=read_lease(root, 1).num_renewals, released=True)


def test_a_lease_that_cannot_be_released_is_waited_for(unreliable_root, caplog):
    with owner(unreliable_root, lease_s=60.0):
        unreliable_root.fs.failures_before.append(OSError("down"))
    assert "the lease of attempt 1 could not be released, so the next trainer waits" in caplog.text
    assert not read_lease(unreliable_root, 1).released


@pytest.mark.slow
def test_what_is_to_be_kept_up_is_called_at_each_renewal(root):
    calls = []
    lease = claim(root, 0, lease_s=LEASE_S)
    with held(root, lease, on_fenced=lambda: None, also=lambda: calls.append(read_lease(root, 1).num_renewals)):
        wait_until(lambda: len(calls) == 3)
    assert calls[:3] == [1, 2, 3]


@pytest.fixture
def sleeper():
    """A process that does nothing."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_process_is_dead_when_it_was_killed_reaped_or_not(sleeper):
    described = describe_process(sleeper.pid)
    assert described is not None
    assert not is_dead(described)
    sleeper.kill()
    while not is_dead(described):  # not yet waited for: a zombie of the system
        time.sleep(0.01)
    sleeper.wait()
    assert is_dead(described)


def test_nothing_is_proven_about_processes_of_another_boot_or_namespace():
    boot, namespace, pid, start = describe_process(os.getpid()).split()
    assert is_dead(f"{boot} {namespace} {pid} {int(start) + 1}")  # the number was used again
    assert not is_dead(f"{boot} {namespace} {pid} {start}")
    assert not is_dead(f"another-boot {namespace} {pid} {int(start) + 1}")
    assert not is_dead(f"{boot} pid:[1] {pid} {int(start) + 1}")


def test_a_description_of_no_process_proves_nothing():
    boot, namespace, _, _ = describe_process(os.getpid()).split()
    for described in ("", "somebody", f"{boot} {namespace}", f"{boot} {namespace} me 1"):
        assert not is_dead(described)


def test_the_longest_lease_that_a_trainer_may_have_is_read_again(root):
    lease = claim(root, 0, lease_s=MOST_LEASE_S)
    assert read_lease(root, 1) == lease


def test_an_owner_whose_process_is_dead_is_not_watched(root, sleeper):
    lease = claim(root, 0, lease_s=60.0)
    root.put(LEASES.name(AttemptName(1)), encode_record(replace(lease, process=describe_process(sleeper.pid))))
    sleeper.kill()
    sleeper.wait()
    assert watch(root) == 1


@pytest.mark.slow
def test_a_watched_lease_is_judged_by_its_changes(root):
    watch = LeaseWatch()
    # Of another machine, so that nothing proves what became of its process.
    lease = replace(claim(root, 0, lease_s=LEASE_S), process=None)
    assert watch.poll(lease).state == "unknown"
    assert watch.poll(replace(lease, num_renewals=1)).state == "alive"
    time.sleep(LEASE_S)
    lease_state = watch.poll(replace(lease, num_renewals=1))
    assert lease_state.state == "silent"
    assert lease_state.unchanged_s >= LEASE_S
    assert watch.poll(replace(lease, num_renewals=2)).state == "alive"
    assert watch.poll(replace(lease, num_renewals=3, released=True)).state == "ended"


def test_a_new_owner_has_not_renewed_anything_yet(root):
    watch = LeaseWatch()
    first = claim(root, 0, lease_s=60.0)
    assert watch.poll(first).state == "unknown"
    assert watch.poll(claim(root, 1, lease_s=60.0)).state == "unknown"


def test_a_watched_owner_that_died_on_this_machine_is_known_to_be_dead(root):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = describe_process(child.pid)
    child.communicate()
    lease = replace(claim(root, 0, lease_s=60.0), process=process)
    assert LeaseWatch().poll(lease).state == "dead"
