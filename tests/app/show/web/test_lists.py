"""Lists, their filters and CSV, SQL, curves and several runs, as a browser gets them."""

import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from app.show.report.conftest import HOSTILE, SPELT, hostile, root, store_rollouts, store_samples
from app.show.web.browsers import browsing
from strategies import make_batch

from ludic.app.show.web import answering, lists, overview
from ludic.root.root import Root
from ludic.root.rows.writer import RolloutWriter

__all__ = ["hostile", "root", "store_rollouts", "store_samples"]


def test_lists_filter_sort_page_and_download(trained: Root, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lists, "_ROWS", 3)
    with browsing(trained) as browser:
        first = browser.get("/rollouts?order=episode_reward%20desc")
        # rewards: 1 of version 0; 1, 1 and 1 of version 1
        assert [row[1] for row in first.rows] == ["reward ↓", "1", "1", "1"]
        assert "1 to 3 of 16" in " ".join(first.text.replace("<b>", "").replace("</b>", "").split())
        after = next(link for link in first.links() if "first=3" in link)
        assert [row[1] for row in browser.get(after).rows[1:]] == ["1", "0.5", "0.5"]
        assert browser.get("/rollouts?first=99&order=episode_reward").status == 200
        where = quote("episode_reward = 0.25 -- a comment")
        found = browser.get(f"/rollouts?where={where}&version=0")
        assert [row[1] for row in found.rows[1:]] == ["0.25"] * 3
        rows = browser.csv(f"/rollouts?where={where}&version=0&csv=rollouts")
        assert len(rows) == 1 + 4
        assert rows[0][:2] == ["rollout_id", "episode_reward"]
        assert {"prompt", "answer", "reward_components"} <= set(rows[0])
        assert [row[0] for row in browser.csv("/versions?csv=versions")] == ["version", "1", "0"]
        assert browser.get("/versions?csv=other").status == 404


def test_where_it_is_not_known_what_is_correct_the_page_says_so_and_hints_at_components(
    root: Root, store_rollouts: Any
):
    store_rollouts([[0.5, 1.0]], reward_components={"has 'it'": 0.0}, correct=None)
    store_rollouts([[0.5, 1.0]], seed=1, reward_components={"has 'it'": 1.0}, correct=None)
    with browsing(root) as browser:
        page = browser.get("/rollouts?where=not%20Correct")
        assert "correct is not known in this run" in page.text
        (link,) = [link for link in page.links() if "reward_components" in link]
        found = browser.get(link)
        assert (found.status, len(found.rows)) == (200, 1 + 2)
        assert "correct is not known" not in found.text
        assert any("marks+is+not+null" in link for link in page.links())


def test_a_wrong_predicate_is_answered_beside_its_box_and_reaches_nothing(trained: Root, tmp_path: Path):
    other = tmp_path / "secret.csv"
    other.write_text("a,b\n1,2\n")
    wrong = ("foo = 1", "true); drop view rollouts; select (1", f"exists (from read_csv('{other}'))", "a < ")
    with browsing(trained) as browser:
        for name in ("versions", "environments", "examples", "groups", "rollouts"):
            for where in wrong if name == "rollouts" else wrong[:1]:
                page = browser.get(f"/{name}?where={quote(where)}")
                assert (page.status, len(page.said["alert"]) > 10, page.rows) == (400, True, []), where
                assert ("input", where) in [(tag, given.get("value")) for tag, given in page.elements]
            assert browser.get(f"/{name}?order=nothing").status == 400
            assert browser.get(f"/{name}").status == 200


def test_hostile_texts_are_text_in_all_lists(hostile: Root):
    with browsing(hostile) as browser:
        for path in ("versions", "environments", "examples", "groups", "rollouts", "rollouts?of=evals", "overview"):
            assert browser.get(f"/{path}").status == 200, path
        answers = [row for row in browser.get("/rollouts").rows[1:] if any(SPELT[:100] in cell for cell in row)]
        assert len(answers) == 10
        for query in ("select env_name, error, wanted from rollouts", "select 1 as x, 2 as y, error from rollouts"):
            assert browser.get(f"/sql?q={quote(query)}").status == 200
        for text in (HOSTILE, f"{HOSTILE}' or true --"):
            assert browser.get(f"/rollouts?where={quote(text)}&search={quote(text)}&order={quote(text)}").status == 400


def test_a_search_finds_texts_whatever_their_case_and_quotes(started: Root):
    with RolloutWriter(started, "w0-test") as writer:
        writer.append(make_batch(worker_id="w0-test", rewards=[[0.5, 1.0]], seed=0))
    with browsing(started) as browser:
        names, row, _ = browser.csv("/rollouts?csv=rollouts")
        text = row[names.index("answer")]
        assert len(browser.get(f"/rollouts?search={quote(text.upper())}").rows) == 1 + 1
        assert browser.get(f"/rollouts?search={quote(text + chr(39) + '%')}").rows == []


def test_sql_is_plotted_within_limits_and_may_only_read(trained: Root, monkeypatch: pytest.MonkeyPatch):
    with browsing(trained) as browser:

        def ask(query: str):
            return browser.get(f"/sql?q={quote(query)}")

        page = ask("select range as x, range * 2 as y, if(range % 2 = 0, 'even', '<b>') as kind from range(6)")
        (figure,) = [given["data-figure"] for _, given in page.elements if "data-figure" in given]
        assert '"x": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]' in figure
        assert '"values": [0.0, null, 4.0, null, 8.0, null]' in figure
        assert "<b>" in figure
        assert page.rows[1] == ["0", "0", "even"]
        page = ask("select 'a' as name, 1 as value")
        assert not [given for _, given in page.elements if "data-figure" in given]
        page = ask("select range as x, 1 as y from range(30000)")
        assert (len(page.rows), "the first 1,000 rows of more" in page.text) == (1001, True)
        assert len(browser.csv("/sql?q=from%20range(30000)&csv=result")) == 30_001
        for query in (
            "copy rollouts to 'x.csv'",
            "from read_csv('/etc/passwd')",
            "selec",
            "create table a as select 1",
            "with a as (delete from roots returning root) from a",
        ):
            assert (ask(query).status, ask(query).rows) == (400, []), query
        monkeypatch.setattr(answering, "MOST_SECONDS", 0.2)
        page = ask("select count(*) from range(100000000000) as a, range(1000) as b")
        assert (page.status, "it took more than 0.2 s" in page.said["alert"]) == (400, True)


def test_curves_and_state_are_read_again_when_something_is_new(trained: Root):
    with browsing(trained) as browser:
        first = browser.client.get("/figures")
        names = {each["name"]: each for each in first.json()["figures"]}
        assert names["reward_mean"]["x"] == [1]
        assert names["reward_mean"]["href"] == "/figure?name=reward_mean"
        assert any("weights were far from those that sampled" in text for text in first.json()["warnings"])
        same = browser.client.get("/figures", headers={"If-None-Match": first.headers["etag"]})
        assert (same.status_code, same.content) == (304, b"")
        assert ["step", "1 of 1"] in [[name, text[:6]] for name, text in browser.json("/state")["facts"]]
        table = browser.get("/figure?name=reward_mean")
        assert table.rows[0] == ["step", "reward"]
        assert overview.different(["step", "step", "a", "a", "a"]) == ["step", "step_", "a", "a_", "a__"]
        wrong = browser.client.get("/figures?by=nothing", headers={"Accept": "application/json"})
        assert (wrong.status_code, "nothing" in wrong.json()["problem"]) == (400, True)


def test_a_run_that_grows_is_seen_and_a_broken_file_is_named(started: Root):
    with browsing(started) as browser:
        for name in ("overview", "versions", "environments", "examples", "groups", "rollouts", "sql"):
            assert browser.get(f"/{name}").status == 200, name
        assert browser.json("/figures")["figures"] == []
        with RolloutWriter(started, "w0-test") as writer:
            writer.append(make_batch(worker_id="w0-test", rewards=[[0.5, 1.0]], seed=0))
            writer.flush()
            assert browser.get("/rollouts").rows == []  # pages do not wait for a listing
            browser.site.run("").renew()
            assert len(browser.get("/rollouts").rows) == 1 + 2
            broken = Path(started.at("rollouts/version=0/env=moar_cats/w9-x-0.parquet"))
            broken.write_bytes(b"PAR1 nothing PAR1")
            browser.site.run("").renew()
            page = browser.get("/overview")
            assert (page.status, broken.name in page.said["bad"]) == (200, True)


def test_runs_of_a_folder_have_addresses_and_common_curves(trained: Root, started: Root, tmp_path: Path):
    folder = tmp_path / "runs"
    for name in ("a", "b & c/seed 0?", "<i>"):
        shutil.copytree(trained.path, folder / name)
    with browsing(str(folder)) as browser:
        assert browser.client.get("/").headers["location"] == "/runs"
        page = browser.get("/runs")
        assert [row[1] for row in page.rows[1:]] == ["<i>", "a", "b & c/seed 0?"]
        assert "/r/b%20%26%20c/seed%200%3F/overview" in page.links()
        inner = browser.get("/r/b%20%26%20c/seed%200%3F/rollouts?order=created_at")
        assert inner.status == 200
        assert any(link.startswith("/r/b%20%26%20c/seed%200%3F/rollout?id=") for link in inner.links())
        assert {browser.get(path).status for path in ("/rollouts", "/r/none/rollouts", "/r/a/b/overview")} == {404}
        found = browser.json("/overlaid?run=a&run=b%20%26%20c/seed%200%3F")["figures"]
        reward = next(each for each in found if each["name"] == "reward_mean")
        assert [each["run"] for each in reward["series"]] == ["a", "b & c/seed 0?"]
        assert browser.get("/curves?run=a&by=seed").status == 200
        assert browser.get("/curves").status == 400
