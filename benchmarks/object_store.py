"""Measure wall and CPU time of S3 calls on the client, through plain s3fs and through ludic's two filesystems.

    python -m benchmarks.object_store

The server is moto, an HTTP server in another process, so the CPU time is the client's. Much of the wall time is the
server's, which is also Python. Fetches of many files are measured with 20 ms added to each response, close to the
latency of S3.
"""

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median

import fsspec

from benchmarks.measure import print_table
from benchmarks.s3_server import BUCKET, s3_server
from ludic.root.storage import CLIENT_CONFIG, S3, ObstoreS3
from ludic.settings import run_script

FILE_BYTES = 300_000
"""Size of a file with 8 groups of 8 rollouts."""
FILES = 200
S3_LATENCY_S = 0.02
"""Seconds added to each response for the table of fetches."""

FileSystems = Mapping[str, fsspec.AbstractFileSystem]


def main(quick: bool = False) -> None:
    """Print two tables: calls, and fetches of many files.

    Args:
        quick: Make a few calls, to check that the benchmark works.
    """
    num_files, rounds = (4, 1) if quick else (FILES, 3)
    with s3_server(0.0):
        _print_calls(_filesystems(), num_files)
    with s3_server(S3_LATENCY_S):
        _print_fetches(_filesystems(), num_files, rounds)


def _filesystems() -> FileSystems:
    return {
        "s3fs": fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True),
        "ludic over s3fs": S3(config_kwargs=CLIENT_CONFIG, use_listings_cache=False, skip_instance_cache=True),
        "ludic over obstore": ObstoreS3(config_kwargs=CLIENT_CONFIG, use_listings_cache=False),
    }


def _print_calls(filesystems: FileSystems, num_files: int) -> None:
    data = os.urandom(FILE_BYTES)
    calls: dict[str, Callable[[fsspec.AbstractFileSystem, str, int], object]] = {
        "put if absent, 300 kB": lambda fs, folder, number: fs.pipe_file(f"{folder}/{number}", data, mode="create"),
        "get": lambda fs, folder, number: fs.cat_file(f"{folder}/{number}"),
        "get a range of 60 kB": lambda fs, folder, number: fs.cat_file(f"{folder}/{number}", start=1000, end=61_000),
        f"list {num_files} files": lambda fs, folder, number: fs.find(folder, detail=True),
        "list an empty folder": lambda fs, folder, number: fs.find(f"{folder}/version={number}", detail=True),
    }
    rows = []
    for label, call in calls.items():
        wall_s, cpu_s = _times(filesystems, call, num_files)
        for name in filesystems:
            ratios = [f"{times['s3fs'] / times[name]:.1f}x" for times in (wall_s, cpu_s)]
            rows.append([label, name, _ms(wall_s[name]), ratios[0], _ms(cpu_s[name]), ratios[1]])
    columns = ["call", "through", "wall", "faster than s3fs", "client's CPU", "less than s3fs"]
    print_table("Calls to an S3 server on this machine (medians)", columns, rows)


def _times(
    filesystems: FileSystems, call: Callable[[fsspec.AbstractFileSystem, str, int], object], num_calls: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the median wall and CPU seconds of a call by filesystem; filesystems take turns, call by call."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in filesystems}
    for number in range(num_calls):
        for name, fs in filesystems.items():
            taken[name].append(_timed(partial(call, fs, f"{BUCKET}/{name}", number)))
    return (
        {name: median(wall for wall, _ in times) for name, times in taken.items()},
        {name: median(cpu for _, cpu in times) for name, times in taken.items()},
    )


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the wall seconds of a call, and the CPU seconds of all threads of this process."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def _print_fetches(filesystems: FileSystems, num_files: int, rounds: int) -> None:
    plain, over_s3fs, over_obstore = filesystems.values()
    names = [f"{BUCKET}/new/{number}" for number in range(num_files)]
    for name in names:
        over_obstore.pipe_file(name, os.urandom(FILE_BYTES))
    fetches: dict[str, Callable[[], object]] = {
        "s3fs, one by one": lambda: [plain.cat_file(name) for name in names],
        "s3fs, cat of a list": lambda: plain.cat(names),
        "ludic over s3fs, 16 threads": lambda: _fetch(over_s3fs, names, 16),
        "ludic over obstore, one by one": lambda: _fetch(over_obstore, names, 1),
        **{
            f"ludic over obstore, {threads} threads": partial(_fetch, over_obstore, names, threads)
            for threads in (4, 8, 16, 32)
        },
    }
    taken = {label: [_timed(fetch) for _ in range(rounds)] for label, fetch in fetches.items()}
    first = median(wall for wall, _ in taken["s3fs, one by one"])
    rows = []
    for label, times in taken.items():
        wall_s, cpu_s = median(wall for wall, _ in times), median(cpu for _, cpu in times)
        rows.append([label, f"{wall_s:.2f} s", f"{first / wall_s:.1f}x", f"{cpu_s:.2f} s"])
    title = f"{num_files} new files of 300 kB, {S3_LATENCY_S * 1e3:.0f} ms added to each answer (medians)"
    print_table(title, ["fetched", "wall", "faster than one by one", "client's CPU"], rows)


def _fetch(fs: fsspec.AbstractFileSystem, names: list[str], num_threads: int) -> list[bytes]:
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(fs.cat_file, names))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


if __name__ == "__main__":
    run_script(main, description=__doc__)
