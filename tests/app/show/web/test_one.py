"""Pages of one thing, as a browser gets them: a rollout, two of them, groups, examples, episodes, training, code."""

import html
import re
import shutil
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest
from app.show.report.conftest import HOSTILE
from app.show.web.browsers import HOME, Browser, Page, browsing
from app.show.web.viewed_run import ANSWERS, ENV, EXAMPLE, QUESTION, make_viewed_run

import ludic
from ludic.app.show.web import conversation, example, rollout
from ludic.app.show.web.texts import differ, page_of
from ludic.root.root import Root

WHOLE = "version = 1 and env_example_id like '17%'"


@pytest.fixture(scope="module")
def viewed(tmp_path_factory: pytest.TempPathFactory) -> Root:
    """A run that is only read."""
    return make_viewed_run(tmp_path_factory.mktemp("viewed"))


@pytest.fixture
def run_copy(viewed: Root, tmp_path: Path) -> Root:
    return Root.open(str(shutil.copytree(viewed.path, tmp_path / "run")))


def ids(root: Root, where: str, column: str = "rollout_id") -> list[str]:
    found = ludic.Run(root).sql(f"select {column} as id from rollouts where {where} order by group_index, depth")  # noqa: S608
    return found["id"].to_list()


def text_of(page: Page) -> str:
    """The words of a page, in their order."""
    body = page.text[page.text.index("<main>") :]
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def spans(page: Page, css: str) -> list[str]:
    return [html.unescape(each) for each in re.findall(rf'<span class="{css}"[^>]*>(.*?)</span>', page.text, re.DOTALL)]


def test_a_rollouts_numbers_come_before_its_texts_and_lead_to_what_is_around_it(viewed: Root) -> None:
    best, wrong, *_ = ids(viewed, WHOLE)
    with browsing(viewed) as browser:
        page = browser.get(f"/rollout?id={best}")
        words = text_of(page)
        # rewards 1, 0, .5, 0: advantage 1 - .5/3
        for part in ("reward 1 ", "advantage +0.833333", "right 1", "correct true", "used at step 2", ENV, EXAMPLE):
            assert words.index(part) < words.index("Messages"), part
        assert words.index("wanted answer 21") < words.index(QUESTION) < words.index(ANSWERS[0][0])
        assert f"scored by {ENV}" in words
        assert words.index("difficulty hard") < words.index("Messages")
        hard = quote("difficulty = 'hard' and level = 0 and version = 1")
        (names, *rows) = browser.csv(f"/rollouts?where={hard}&csv=rollouts")
        assert [row[names.index("difficulty")] for row in rows] == ["hard"] * len(ANSWERS)
        assert '<option value="difficulty">' in browser.get("/overview").text
        sibling = ids(viewed, WHOLE)[2]
        names = ("rollout", "group", "episode", "example", "compare", "code", "response")
        links = [link for link in page.links() if link.startswith(tuple(f"/{name}?" for name in names))]
        assert f"/compare?a={best}&b={sibling}" in links
        assert {link.partition("?")[0][1:] for link in links} == set(names)
        for link in {link.partition("?")[0]: link for link in links}.values():
            assert browser.get(link.partition("#")[0]).status == 200, link
        # the best has the second best as its best sibling, and all others the best
        assert f"/compare?a={wrong}&b={best}" in browser.get(f"/rollout?id={wrong[-12:]}").links()
        rows = browser.csv(f"/rollout?id={best}&csv=group")
        assert [row[rows[0].index("episode_reward")] for row in rows[1:]] == ["0.0", "0.5", "0.0"]


def test_tokens_are_coloured_by_what_the_address_says_and_shown_a_page_at_a_time(
    viewed: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    best, wrong, *_ = ids(viewed, WHOLE)
    with browsing(viewed) as browser:

        def shown(rollout_id: str, color: str) -> list[tuple[str, str, str]]:
            page = browser.get(f"/rollout?id={rollout_id}&color={color}")
            tokens = page.text[page.text.index('<pre class="tokens">') :].partition("</pre>")[0]
            return re.findall(r'<span(?: class="(\w+)")? title="([^"]*)">(.*?)</span>', tokens, re.DOTALL)

        by_logprob = shown(best, "logprob")
        assert html.unescape("".join(text for *_, text in by_logprob)) == f"{ANSWERS[0][0]} Sure."
        assert by_logprob[0][0] == "q0"  # the first logprob of the made run is 0
        assert "logprob 0, probability 1\nreward 0\nadvantage +0.8333" in by_logprob[0][1]
        assert len({css for css, *_ in by_logprob}) > 4
        assert {css for css, *_ in shown(best, "advantage")} == {"p4"}
        assert {css for css, *_ in shown(wrong, "advantage")} == {"n4"}
        assert {css for css, *_ in shown(best, "mask")} == {"q2"}
        assert "no token statistics" in browser.get(f"/rollout?id={best}&color=ratio").text
        assert browser.get(f"/rollout?id={best}&color=red").status == 400
        tools = ids(viewed, "num_turns = 3")[0]
        assert {css for css, *_ in shown(tools, "mask")} == {"q2", "ns"}
        monkeypatch.setattr(rollout, "TOKENS_A_PAGE", 25)
        page = browser.get(f"/rollout?id={best}&position=30")
        assert "26 to 50" in page.text
        assert [row[0] for row in browser.get(f"/response?id={best}&position=30").rows[1:]] == [
            str(index) for index in range(25, 50)
        ]
        parts = ["".join(text for *_, text in shown(best, f"none&position={at}")) for at in range(0, 75, 25)]
        assert html.unescape("".join(parts)) == f"{ANSWERS[0][0]} Sure."  # no space is lost between pages


def test_two_rollouts_show_where_they_differ_and_lead_to_the_best_sibling(viewed: Root) -> None:
    best, wrong, short, _ = ids(viewed, WHOLE)
    with browsing(viewed) as browser:
        page = browser.get(f"/compare?a={best}&b={wrong}")
        assert spans(page, "own")[1:] == ["21", "21", "20", "20"]  # the first one is the legend's
        assert (
            f"both begin with the same {len('I add the tens, then the ones: 10 + 0 and 7 + 4 make ')} ch" in page.text
        )
        assert "2 equal messages at the beginning" in page.text
        assert f"/compare?a={best}&b={short}" in page.links()
        assert "logprob" in browser.get(f"/compare?a={best}&b={wrong}&color=advantage").text
        assert "Both sides are the same rollout" in browser.get(f"/compare?a={best}&b={best}").text
        other = ids(viewed, "num_turns = 3")[0]
        page = browser.get(f"/compare?a={best}&b={other}")
        assert "different examples" in page.text
        assert "no such message" in page.text


def test_an_examples_answers_are_columns_of_versions_newest_first(
    viewed: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = urlencode({"env": ENV, "id": EXAMPLE})
    with browsing(viewed) as browser:
        words = text_of(browser.get(f"/example?{of}"))
        # rollouts 1, 0, .5, 0; evaluations 0, 0 of version 0 and 0, 1 of version 2
        heads = ["version 2 : 0.4167", "version 1 : 0.375", "version 0 : 0.25"]
        assert sorted(heads, key=words.index) == heads
        assert [row[0] for row in browser.csv(f"/example?{of}&csv=versions")] == ["version", "2", "1", "0"]
        assert "2 more" in words
        assert text_of(browser.get(f"/example?{of}&version=2")).count("It is 22.") == 2
        monkeypatch.setattr(example, "_VERSIONS_A_PAGE", 2)
        page = browser.get(f"/example?{of}")
        assert "version 0 :" not in text_of(page)
        (next_page,) = [link for link in page.links() if "column=2" in link]
        assert "version 0 : 0.25" in text_of(browser.get(next_page))


def test_a_group_shows_its_members_and_its_best_and_worst_answer(viewed: Root) -> None:
    best, *_, worst = ids(viewed, WHOLE)
    (group,) = set(ids(viewed, WHOLE, "group_id"))
    with browsing(viewed) as browser:
        page = browser.get(f"/group?id={group}")
        assert [row[2:4] for row in page.rows[1:]] == [["1", "true"], ["0", "false"], ["0.5", "false"], ["0", "false"]]
        words = text_of(page)
        assert words.index("best, reward 1 assistant I add") < words.index("worst, reward 0 assistant")
        assert any(link.startswith(f"/compare?a={best}&b=") for link in page.links())
        assert worst in {row[3] for row in browser.csv(f"/group?id={group}&csv=rollouts")}


def test_an_episode_is_a_tree_of_agents_and_its_turns_have_rewards(viewed: Root) -> None:
    agent, first, second = ids(viewed, "episode_id in (select episode_id from rollouts where depth > 0)")
    with browsing(viewed) as browser:
        page = browser.get(f"/episode?id={second}")
        rows = browser.csv(f"/episode?id={second}&csv=agents")
        at = {name: index for index, name in enumerate(rows[0])}
        assert [row[at["rollout_id"]] for row in rows[1:]] == [agent, first, second]
        assert [row[at["call"]] for row in rows[1:]] == [
            "",
            'delegate({"task": "add 17 and 4"})',
            'delegate({"task": "check it"})',
        ]
        assert [row[0] for row in page.rows[1:4]] == ["agent", "└ helper", "└ helper ◀"]
        tools = ids(viewed, "num_turns = 3")[0]
        rows = browser.csv(f"/episode?id={tools}&csv=turns")
        at = {name: index for index, name in enumerate(rows[0])}
        steps = [(row[at["who"]], row[at["text"]], row[at["reward"]], row[at["token_reward"]]) for row in rows[1:]]
        assert steps[:4] == [
            ("agent", "first", "", "0.25"),
            ("tool", 'add({"a": 17, "b": 4}) → 21', "", ""),
            ("tool", 'lookup({"page": "sums"}) → error: there is no page <b>sums</b>', "", ""),
            ("environment", "You said first.", "0.25", ""),
        ]
        assert [step[2] for step in steps if step[0] == "environment"] == ["0.25", "0.5", "1.0"]
        page = browser.get(f"/rollout?id={tools}")
        assert "I need a tool." in page.text
        (result,) = [link for link in page.links() if "name=result-step-0-0" in link]
        assert text_of(browser.get(result)).endswith("Characters 1 to 2 of 2 21")


def test_requests_and_drops_are_counted_and_lead_to_their_groups_and_rollouts(viewed: Root) -> None:
    with browsing(viewed) as browser:
        counts = {tuple(row[:2]): row[2] for row in browser.csv("/requests?csv=fates")[1:]}
        # of 8 groups the two steps take one each, five have equal rewards, and one waits; each has a running one beside
        assert counts == {
            ("running", ""): "8",
            ("complete", "drop_zero_variance_groups"): "5",
            ("complete", "used"): "2",
            ("complete", "waiting"): "1",
        }
        used = "/requests?outcome=complete&fate=used"
        groups = [link for link in browser.get(used).links() if link.startswith("/group?")]
        assert len(groups) == 2
        assert browser.get(groups[0]).status == 200
        assert len(browser.csv(f"{used}&csv=groups")) == 1 + 2
        assert browser.get("/requests?outcome=complete&fate=nothing").status == 404
        assert [row[:3] for row in browser.csv("/drops?csv=reasons")[1:]] == [["drop_zero_variance_groups", "16", "5"]]
        (drop,) = [link for link in browser.get("/drops").links() if "reason=drop_zero" in link]
        rows = browser.csv(f"{drop}&csv=rollouts")
        assert len(rows) == 1 + 3 * 4 + 3 + 1  # three groups of four, an episode of three agents, and one alone
        assert any(link.startswith("/rollout?") for link in browser.get(drop).links())
        assert browser.get("/drops?reason=nothing").status == 404


@pytest.mark.slow
def test_evaluations_have_intervals_and_two_versions_are_compared_on_the_same_examples(viewed: Root) -> None:
    with browsing(viewed) as browser:
        page = browser.get("/evaluations")
        (mean,) = [row for row in page.rows if row[:3] == ["2", ENV, "mean_reward"]]
        assert mean[3] == "0.5"
        assert " to " in mean[4]
        assert 'data-figure="' in page.text
        page = browser.get("/paired?a=0&b=2")
        # by example: .5 - 0, and no change of the four others
        assert [row[0] for row in page.rows if row[0] in ("gained", "lost", "equal")] == ["gained"] + 4 * ["equal"]
        (both,) = [link for link in page.links() if link.startswith("/compare?")]
        assert "It is 22" in text_of(browser.get(both))
        assert len(browser.csv("/paired?a=0&b=2&change=gained&csv=examples")) == 1 + 1
        for wrong in ("a=memory://x@0&b=2", "a=0&b=/etc@1", "a=0&b=7", "a=0&b=2&change=all"):
            assert browser.get(f"/paired?{wrong}").status == 400, wrong


def test_the_code_that_scored_is_shown_as_it_was_stored(viewed: Root) -> None:
    with browsing(viewed) as browser:
        (link,) = [link for link in browser.get("/code").links() if link.startswith("/code?sha256=")]
        assert "return float('21' in answer) # <script>alert(1)</script>" in text_of(browser.get(link))
        assert browser.get("/code?sha256=" + "0" * 64 + "&path=sums.py").status == 404


def label(browser: Browser, **form: str) -> Page:
    answer = browser.client.post("/label", data=form, headers={"Origin": HOME})
    return (
        browser.get(answer.headers["location"].partition("#")[0])
        if answer.status_code == 303
        else Page(answer.status_code, answer.text)
    )


def test_a_label_is_stored_by_its_author_and_shown(run_copy: Root) -> None:
    best, other, *_ = ids(run_copy, WHOLE)
    with browsing(run_copy, author="me") as browser:
        page = label(browser, id=best, mark="0.5", note="</form><script>", name="", author="")
        assert "label 0.5 </form><script> by me" in text_of(page)
        assert "clear bad by you" in text_of(label(browser, id=best, mark="bad", name="clear", author="you"))
        assert label(browser, id="none", mark="1").status == 404
        assert label(browser, id=best, mark="1" * 201).status == 400
        assert browser.get("/label").status == 404
        shutil.rmtree(f"{run_copy.path}/labels")
        Path(run_copy.path, "labels").write_text("a folder that can't be written")
        refused = label(browser, id=other, mark="1", note='all of "it"<b>')
        assert refused.status == 400
        assert "labels" in refused.said["alert"]
        fields = {given["name"]: given["value"] for tag, given in refused.elements if tag == "input"}
        assert fields == {"id": other, "mark": "1", "note": 'all of "it"<b>', "name": "", "author": ""}


def test_what_there_is_not_is_said_in_a_line(viewed: Root) -> None:
    best = ids(viewed, WHOLE)[0]
    unknown = "00000000-0000-7000-8000-000000000000"
    paths = [f"{name}?id=zz'\"<" for name in ("rollout", "group", "episode", "response")]
    paths += [f"compare?a={best}&b={unknown}", f"text?id={best}&name=message-9", f"calls?id={best}&message=9"]
    paths += [f"example?env={quote(ENV)}&id=none", f"example?{urlencode({'env': ENV, 'id': EXAMPLE})}&version=9"]
    with browsing(viewed) as browser:
        for path in paths:
            page = browser.get(f"/{path}")
            assert (page.status, len(page.said["alert"].strip().splitlines())) == (404, 1), path
        assert browser.get("/rollout").status == 400


@pytest.mark.slow
def test_long_texts_tables_and_conversations_are_paged(run_copy: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    from app.show.web.viewed_run import text_row

    from ludic.records.rollout import Message, RolloutBatch, RolloutGroup, RolloutMetadata, ToolCall
    from ludic.root.rows.writer import RolloutWriter

    calls = tuple(ToolCall(id=str(i), name="f", arguments="{}", result=f"result {i}") for i in range(30))
    messages = [Message(role="assistant", content="x" * 1_000_000 + "THE END")]
    messages += [Message(role="user", content=f"message {i}", tool_calls=calls if i == 60 else ()) for i in range(70)]
    rows = [
        text_row("?", "!", episode_reward=0.5, group_id="many", group_index=i, request_index=i, env_example_id="many",
                 group_size=120, policy_version=0, messages=messages if i == 0 else messages[1:2])
        for i in range(120)
    ]  # fmt: skip
    with RolloutWriter(run_copy, "w9-many") as writer:
        group = RolloutGroup(key="many", rollouts=tuple(rows))
        writer.append(RolloutBatch(groups=(group,), metadata=RolloutMetadata(worker_id="w9-many")))
    long = rows[0].rollout_id
    with browsing(run_copy) as browser:
        page = browser.get(f"/rollout?id={long}")
        assert len(page.text) < 200_000
        assert f"{1_000_007 - 6_000:,} more characters" in page.text
        assert "THE END" not in page.text
        (more,) = [link for link in page.links() if "name=message-0" in link]
        last = next(link for link in browser.get(more).links() if "start=1000000" in link)
        assert "Characters 1,000,001 to 1,000,007 of 1,000,007" in text_of(browser.get(last.partition("#")[0]))
        assert "THE END" in browser.get(last.partition("#")[0]).text
        assert browser.client.get(f"/text?id={long}&name=message-0&csv=text").text.strip().endswith('THE END"')
        assert "message 48" in page.text
        assert "message 49" not in page.text
        (second,) = {link.partition("#")[0] for link in page.links() if "message=50" in link and "/rollout" in link}
        page = browser.get(second)
        assert "message 69" in page.text
        assert "10 more calls" in page.text
        (all_calls,) = [link for link in page.links() if link.startswith("/calls?")]
        assert [row[-2] for row in browser.get(all_calls).rows[1:]] == [f"result {i}" for i in range(30)]
        page = browser.get("/group?id=many")
        assert len(page.rows) == 1 + conversation.ROWS_A_PAGE
        assert len(browser.csv("/group?id=many&csv=rollouts")) == 1 + 120
        assert len(browser.get("/group?id=many&member=100").rows) == 1 + 20
        compared = browser.get(f"/compare?a={long}&b={rows[1].rollout_id}")
        assert len(compared.text) < 200_000


@pytest.mark.slow
def test_hostile_texts_are_text_in_all_pages_and_no_link_is_broken(tmp_path: Path) -> None:
    text = f"{HOSTILE}</textarea></form>\x9b2J"
    root = make_viewed_run(tmp_path, question=text, answer=text, wanted=text)
    todo, seen = ["/requests", "/drops", "/evaluations", "/paired?a=0&b=2", "/code", "/groups", "/rollouts"], {}
    with browsing(root) as browser:
        while todo:
            path = todo.pop(0)
            name = path.partition("?")[0]
            if path in (*seen, "/", "") or "csv=" in path or sum(each.partition("?")[0] == name for each in seen) >= 5:
                continue
            page = seen[path] = browser.get(path)  # which checks its elements and characters
            assert page.status == 200, path
            todo += [link.partition("#")[0] for link in page.links()]
    names = {path.partition("?")[0] for path in seen}
    assert {f"/{name}" for name in ("rollout", "group", "compare", "episode", "example", "response", "text")} <= names
    shown = [html.unescape(page.text) for path, page in seen.items() if path.startswith("/rollout?")]
    assert any("<script>document.title = 'hacked'</script></pre>" in each and "\\x9b2J" in each for each in shown)


def test_a_difference_holds_both_texts_whole_and_marks_whole_words() -> None:
    for a, b, own_a, own_b in (
        ("the cat sat", "the bat sat", ["cat"], ["bat"]),
        ("one two", "one two three", [], [" three"]),
        ("", "x", [], ["x"]),
        ("same", "same", [], []),
    ):
        found = differ(a, b)
        assert ("".join(piece.text for piece in found.a), "".join(piece.text for piece in found.b)) == (a, b)
        assert [piece.text for piece in found.a if piece.kind == "own"] == own_a
        assert [piece.text for piece in found.b if piece.kind == "own"] == own_b
    many = differ(
        "\n".join("ab " * 500 + str(i) for i in range(9)), "\n".join("ab " * 500 + str(i) for i in range(9, 0, -1))
    )
    assert many.unit == "line"
    assert differ("ab " * 30_000, "ba " * 30_000).unit is None
    assert page_of("abcdefg", 5, most=3) == page_of("abcdefg", 3, most=3)
    assert page_of("abcdefg", 99, most=3).text == "g"
