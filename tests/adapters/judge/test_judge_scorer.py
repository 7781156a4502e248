"""LLM judges behind a real server: its answers become scores, and whatever is wrong with them a counted failure."""

import json
import time
from itertools import count

import pytest
from judge_replies import answer, send

from ludic.errors import ConfigError


def judged(run, judge, **options):
    return run.score(**{"scorer_timeout_s": 20.0, "concurrency": 8, **judge, **options})


@pytest.mark.slow
def test_an_answer_becomes_a_score_with_prompt_model_and_cost(run, judge, judge_server):
    report = judged(run, judge, judge_input_price=2.0, judge_output_price=30.0)
    assert (report.scorer, report.num_scored, report.num_failed) == ("judge", 8, 0)
    assert (report.num_input_tokens, report.num_output_tokens) == (800, 80)
    assert report.cost == pytest.approx(0.004)  # 8 x (100 x 2 + 10 x 30) / 1e6
    rows = run.sql("select distinct value, scorer, scorer_version, model, prompt, cost from scores").rows()
    template = 'Question: {prompt}\nAnswer: {response}\nReply as JSON, not {"score": 1}.'
    assert rows == [(0.5, "judge", report.version, "big", template, 0.0005)]
    first = run.sql("select messages from rollouts limit 1").item()
    texts = [message["content"] for message in first]
    wanted = f'Question: {texts[0]}\nAnswer: {texts[1]}\nReply as JSON, not {{"score": 1}}.'
    body = next(body for body in judge_server.bodies if body["messages"][0]["content"] == wanted)
    assert (body["model"], body["temperature"]) == ("big", 0)
    assert set(judge_server.keys) == {None}
    assert judged(run, judge).num_done_before == 8


@pytest.mark.slow
def test_the_version_is_that_of_model_prompt_pattern_and_options(run, judge):
    versions = {
        judged(run, {**judge, **other}).version
        for other in ({}, {"judge_model": "b"}, {"judge_pattern": r"\d"}, {"judge_options": {"max_tokens": 9}})
    }
    assert len(versions) == 4
    assert (
        judged(run, {**judge, "judge_tries": 2, "judge_input_price": 1.0, "judge_output_price": 1.0}).version
        in versions
    )


@pytest.mark.slow
def test_a_pattern_takes_the_last_match(run, judge, judge_server):
    judge_server.reply = lambda handler, body: answer(handler, "Score: 2. No, on reflection. Score: 7")
    report = judged(run, judge, judge_pattern=r"Score: (\d+)")
    assert report.num_scored == 8
    assert run.sql("select distinct value from scores").item() == 7.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "choice", "reason"),
    [
        ("I can't judge that.", {}, 'the judge answered "I can\'t judge that.", wanted a JSON number'),
        ("true", {}, "the judge answered 'true', wanted a JSON number"),
        ("NaN", {}, "the judge answered 'NaN', wanted a JSON number"),
        ("1e999", {}, "the judge answered '1e999', wanted a JSON number"),
        ("1", {"finish_reason": "length"}, "the judge's answer was cut at its maximum length: '1'"),
        (None, {}, "the judge's answer has no text"),
    ],
)
def test_nonsense_is_a_failure_that_is_not_asked_again_and_still_costs(run, judge, judge_server, text, choice, reason):
    judge_server.reply = lambda handler, body: answer(handler, text, **choice)
    report = judged(run, judge)
    assert (report.num_scored, report.num_failed, report.reasons) == (0, 8, {reason: 8})
    assert report.num_input_tokens == 800
    assert len(judge_server.bodies) == 8
    assert run.sql("select sum(num_output_tokens)::bigint from scores where error is not null").item() == 80


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (lambda handler, body: send(handler, "[]"), "answered no chat completion"),
        (lambda handler, body: send(handler, '{"choices": []}'), "the judge's answer has no text"),
        (lambda handler, body: send(handler, '{"choices": [], "usage": {"prompt_tokens": -1}}'), "no chat completion"),
        (lambda handler, body: send(handler, "no such model", 404), "the server answered 404: 'no such model'"),
        (lambda handler, body: send(handler, " " * (9 << 20)), "answered more than 8,388,608 bytes"),
    ],
)
def test_an_answer_of_no_use_is_a_failure(run, judge, judge_server, reply, reason):
    judge_server.reply = reply
    report = judged(run, judge)
    assert report.num_failed == 8
    assert all(reason in error for error in report.reasons)
    assert len(judge_server.bodies) == 8


@pytest.mark.slow
def test_a_failing_server_is_asked_again(run, judge, judge_server):
    numbers = count()

    def reply(handler, body):
        match next(numbers):
            case 0:
                send(handler, "out of memory", 500)
            case 1:
                send(handler, '{"choices": [{"mess', promised=1000)  # half an answer, and the connection ends
                handler.close_connection = True
            case 2:
                send(handler, '{"choices": [{"mess')
            case 3:
                send(handler, "too many requests", 429)
            case _:
                answer(handler, "1")

    judge_server.reply = reply
    report = judged(run, judge)
    assert (report.num_scored, report.num_failed) == (8, 0)
    assert len(judge_server.bodies) == 12


@pytest.mark.slow
def test_a_server_that_keeps_failing_costs_the_scores_and_not_the_run(run, judge, judge_server):
    judge_server.reply = lambda handler, body: send(handler, "out of memory", 500)
    report = judged(run, judge, judge_tries=2)
    assert report.reasons == {"the server answered 500: 'out of memory'": 8}
    assert len(judge_server.bodies) == 16
    judge_server.reply = lambda handler, body: answer(handler, "0.25")
    assert judged(run, judge).num_done_before == 8
    assert judged(run, judge, retry_failed=True).num_scored == 8
    assert run.sql("select value, error from scores").rows() == [(0.25, None)] * 8


@pytest.mark.slow
def test_a_server_that_is_gone_costs_the_scores(run, judge):
    report = judged(run, judge | {"judge_url": "http://127.0.0.1:9/v1"}, judge_tries=2)
    assert report.num_failed == 8
    assert all("ConnectError" in reason for reason in report.reasons)


@pytest.mark.slow
def test_a_slow_server_costs_its_own_rollouts(run, judge, judge_server):
    slow = run.sql("select messages[2].content from rollouts where episode_reward = 0.5").to_series().to_list()

    def reply(handler, body):
        if any(f"Answer: {text}\n" in body["messages"][0]["content"] for text in slow):
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            for _ in range(100):  # a byte now and then keeps the connection alive
                handler.wfile.write(b" ")
                time.sleep(0.1)
        answer(handler, "1")

    judge_server.reply = reply
    began = time.monotonic()
    report = judged(run, judge, scorer_timeout_s=1.5)
    assert (report.num_scored, report.num_failed) == (6, 2)
    assert time.monotonic() - began < 9


@pytest.mark.slow
def test_the_key_is_sent_and_never_stored(run, judge, judge_server, monkeypatch, capfd):
    monkeypatch.setenv("MY_KEY", "sk-secret-123")
    judge_server.reply = lambda handler, body: send(handler, f"no such key: {handler.headers['Authorization']}", 401)
    report = judged(run, judge, judge_key_env="MY_KEY")
    assert set(judge_server.keys) == {"Bearer sk-secret-123"}
    assert report.reasons == {"the server answered 401: 'no such key: Bearer ***'": 8}
    shown = "".join(capfd.readouterr()) + json.dumps(run.sql("select * from scores").to_dicts(), default=str)
    assert "sk-secret" not in shown


def test_a_judge_that_can_not_work_is_refused(run, judge, monkeypatch, tmp_path):
    monkeypatch.setenv("BAD_KEY", "sk-with\nnewline")
    (tmp_path / "empty.txt").write_text("Is it good?")
    for options, reason in (
        ({"judge_url": "http://user:pass@host/v1"}, "judge_url holds a user"),
        ({"judge_url": "localhost:8000"}, "judge_url is 'localhost:8000', wanted such as"),
        ({"judge_model": None}, "judge_url needs judge_model"),
        ({"judge_prompt": str(tmp_path / "none.txt")}, "can't be read"),
        ({"judge_prompt": str(tmp_path / "empty.txt")}, "has none of {prompt}"),
        ({"judge_pattern": "("}, "is no regular expression"),
        ({"judge_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY, which judge_key_env names, is not set"),
        ({"judge_key_env": "BAD_KEY"}, "holds spaces or other characters"),
        ({"judge_input_price": 1.0}, "belong together"),
    ):
        with pytest.raises(ConfigError, match=reason.replace("{", r"\{")) as error:
            judged(run, judge | options)
        assert "pass@" not in str(error.value)
        assert "sk-with" not in str(error.value)
