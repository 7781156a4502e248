"""Measure the pages of `ludic view --web` on a run of 100,032 rollouts, on this disk and on S3: seconds of the server.

    python -m benchmarks.pages

Every page of the registry is asked, as a browser asks it, in this process and without a network between. The first page
includes everything from opening the run on: its connection, its first query, and its template. Its scalars were cached
by an earlier connection, and the imports are timed beside. A ledger uses each rollout once. The server of S3 is moto,
in a process of its own on this machine, without added latency.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import fsspec
import httpx2

import ludic
from benchmarks.measure import import_seconds, milliseconds, print_table, seconds_since, wall_and_cpu
from benchmarks.s3_server import BUCKET, s3_server
from benchmarks.stores import make_store
from ludic.app.show.web.answering import Answering
from ludic.app.show.web.pages import PAGES
from ludic.app.show.web.security import TOKEN, Guard
from ludic.app.show.web.site import Site
from ludic.base import CACHE_VARIABLE, host_names
from ludic.root import Root, start_attempt
from ludic.root.rows import RolloutReader, write_ledger
from ludic.root.sql import Planner
from ludic.settings import run_script
from ludic.training import TrainConfig
from ludic.training.batches.source import batch_rules

_GROUPS_A_STEP = 64
_HOME = "http://127.0.0.1:8000"
_FIRST = "overview"
_FIRST_PAGE = "the first page, with the connection"

Times = dict[str, tuple[float, float]]
"""Wall and CPU seconds by page."""


def main(quick: bool = False) -> None:
    """Print a table.

    Args:
        quick: Use a small run and one round, to check that the benchmark works.
    """
    num_files, rounds = (4, 1) if quick else (1_563, 5)
    folder = Path(tempfile.mkdtemp())
    os.environ[CACHE_VARIABLE] = str(folder / "cache")
    try:
        root = make_store(str(folder / "run"), num_files, num_versions=4, mean_length=20)
        plan_steps(root)
        print_times("on this disk", root.url, rounds)
        with s3_server(latency_s=0.0):
            url = f"s3://{BUCKET}/run"
            fsspec.filesystem("s3").put(f"{root.path}/", url, recursive=True)
            print_times("on S3 (moto)", url, rounds)
    finally:
        shutil.rmtree(folder)


def plan_steps(root: Root) -> None:
    """Write the ledger of a trainer that used every rollout once."""
    config = TrainConfig()
    planner = Planner(batch_rules(replace(config.batch, filters=(), max_off_policy_steps=None), _GROUPS_A_STEP))
    planner.add(RolloutReader(root, planner.columns).poll(None))
    attempt, step = start_attempt(root, config=config.flat()), 0
    while (plan := planner.plan(step=step + 1, attempt_id=attempt.attempt_id, trainer_version=step)) is not None:
        step += 1
        write_ledger(root, attempt, step, plan)


def print_times(place: str, url: str, rounds: int) -> None:
    con = ludic.connect(url)
    ((num_rollouts,),) = con.sql("select count(*) from rollouts").fetchall()
    found = [asyncio.run(measure(url)) for _ in range(rounds)]
    rows = [["import the pages", *milliseconds([import_seconds("ludic.app.show.web.server") for _ in range(rounds)])]]
    rows += [[name, *milliseconds([times[name] for times in found])] for name in found[0]]
    print_table(f"pages: {place}, a run of {num_rollouts:,} rollouts", ["", "wall, ms", "CPU, ms"], rows)


async def measure(url: str) -> Times:
    """Open a run and ask every page."""
    times: Times = {}
    start, tokens = wall_and_cpu(), list[str]()
    with Site(Root.open(url)) as site:
        app = Guard(Answering(site, asyncio.Event()).app, host_names("127.0.0.1"), tokens.append)
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url=_HOME, follow_redirects=True) as browser:
            (await browser.get(f"/{_FIRST}", params={TOKEN: tokens[0]})).raise_for_status()
            times[_FIRST_PAGE] = seconds_since(start)
            for name, query in queries(site).items():
                await browser.get(f"/{name}?{urlencode(query)}")  # what it keeps is read again for new data only
                start = wall_and_cpu()
                answer = await browser.get(f"/{name}?{urlencode(query)}")
                times[name] = seconds_since(start)
                assert answer.status_code == 200, (name, answer.text)
    return times


def queries(site: Site) -> Mapping[str, Mapping[str, str]]:
    """Return the parameters that each page of a run is asked with."""
    data = site.run("")
    sql = "select rollout_id, group_id, env_name, env_example_id from rollouts order by rollout_id limit 2 offset 4"
    row, other = data.ask(sql, {}).to_dicts()
    of_rollout = {"id": row["rollout_id"]}
    return {
        name: {
            "rollouts": {"order": "episode_reward desc", "where": "episode_reward > 0.5"},
            "figure": {"name": "reward_mean"},
            "sql": {"q": "select version, avg(episode_reward) as reward from rollouts group by all order by 1"},
            "group": {"id": row["group_id"]},
            "example": {"env": row["env_name"], "id": row["env_example_id"]},
            "compare": {"a": row["rollout_id"], "b": other["rollout_id"]},
            "text": {**of_rollout, "name": "message-0"},
        }.get(name, of_rollout)
        for name, page in PAGES.items()
        if page.of_run and not page.posts and name not in _WITHOUT
    }


_WITHOUT = ("paired", "label")
"""Pages that this run has nothing for: it has no evaluations."""


if __name__ == "__main__":
    run_script(main, description=__doc__)
