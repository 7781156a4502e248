"""Reward models behind a server that answers as vLLM does: what is asked, what is made of the answers, and failures.

tests/vllm_runs/test_pooling.py asks a real one.
"""

import asyncio
import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from adapters.judge.conftest import JudgeServer
from judge_replies import send

import ludic
from ludic.environments.registry import make_environment
from ludic.errors import ConfigError, ScorerError
from ludic.run.code_uses import sampling_uses
from ludic.run.config import RunConfig

Answer = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


def classify(*logits: float, num_tokens: int = 9) -> Answer:
    data = [{"index": 0, "label": "LABEL_0", "probs": logits, "num_classes": len(logits)}]
    body = {"id": "classify-1", "object": "list", "model": "rm", "data": data, "usage": {"prompt_tokens": num_tokens}}
    return lambda handler, _: send(handler, json.dumps(body))


@pytest.fixture
def server(judge_server: JudgeServer) -> JudgeServer:
    judge_server.url = judge_server.url.removesuffix("/v1")
    judge_server.reply = classify(1.5)
    return judge_server


@pytest.fixture
def score(server: JudgeServer, tmp_path: Path) -> Callable[..., float]:
    """score(SETTING=...): the reward of an answer."""

    def score(**settings: Any) -> float:
        (tmp_path / "rows.jsonl").write_text('{"question": "What?"}')
        name = f"pooling:{server.url}"
        options = {"scorer": name, "answer": None, "heldout_share": 0, "scorer_options": {name: settings}}
        environment = make_environment(f"qa/{tmp_path}/rows.jsonl", {**options, "system_prompt": "Be brief."})()
        environment.reset(environment.example(0, "train"))
        return asyncio.run(environment.step("That.")).reward

    return score


def test_the_server_gets_the_conversation_and_answers_its_logit(server: JudgeServer, score, monkeypatch) -> None:
    monkeypatch.setenv("KEY_OF_SERVER", "sesame-key")
    assert score(key_env="KEY_OF_SERVER") == 1.5
    (body,) = server.bodies
    roles = ["system", "user", "assistant"]
    assert body == {
        "messages": [{"role": r, "content": c} for r, c in zip(roles, ["Be brief.", "What?", "That."], strict=True)],
        "use_activation": False,
    }
    assert server.keys == ["Bearer sesame-key"]
    assert score(model="rm", truncate="left", max_length=100) == 1.5
    assert {name: server.bodies[1][name] for name in ("model", "truncate_prompt_tokens", "truncation_side")} == {
        "model": "rm",
        "truncate_prompt_tokens": 100,
        "truncation_side": "left",
    }


def test_settings_choose_among_labels(server: JudgeServer, score) -> None:
    server.reply = classify(0.5, 2.0, -1.0)
    assert score(label=2) == -1.0
    assert score(label=1, minus_label=0) == 1.5
    assert score(label=1, activation="sigmoid") == pytest.approx(1 / (1 + 2.718281828**-2))
    with pytest.raises(ConfigError, match=r"the model has 3 labels \(0, 1, 2\), and the score is the logit of one"):
        score()
    with pytest.raises(ConfigError, match=r"the model has no label 3; it has 0, 1, 2"):
        score(label=3)


def test_what_the_server_says_against_it_fails_the_score(server: JudgeServer, score) -> None:
    with pytest.raises(ScorerError, match=r"the conversation has 9 tokens, and max_length is 8; set truncate"):
        score(max_length=8)
    server.reply = lambda handler, body: send(handler, '{"error": {"message": "Not Found"}}', 404)
    with pytest.raises(ScorerError, match=r"reward model pooling:http://.*: the server answered 404: .*Not Found"):
        score()
    server.reply = lambda handler, body: send(handler, '{"data": [{"embedding": [1.0]}]}')
    with pytest.raises(ScorerError, match="the answer is no classification: Object missing required field `probs`"):
        score()
    server.reply = lambda handler, body: send(handler, '{"data": []}')
    with pytest.raises(ScorerError, match="the answer has no scores, wanted those of one conversation"):
        score()
    replies = iter([lambda handler, body: send(handler, "busy", 503), classify(2.0)])
    server.reply = lambda handler, body: next(replies)(handler, body)
    assert score() == 2.0


@pytest.mark.parametrize(
    ("url", "settings", "said"),
    [
        ("localhost:8000", {}, r"the URL of a pooling server is 'localhost:8000', wanted such as http://localhost"),
        ("http://me:secret@host", {}, "the URL of a pooling server holds a user, a password or a query"),
        ("http://host", {"label": "good"}, "label is 'good', wanted a whole number or None"),
        ("http://host", {"device": "cpu"}, "setting 'device' is unknown"),
        ("http://host", {"key_env": "ABSENT_KEY"}, "the environment variable ABSENT_KEY, .* is not set"),
    ],
)
def test_mistakes_are_found_before_a_request(tmp_path: Path, url: str, settings: dict[str, Any], said: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "What?", "answer": "That."}')
    name = f"pooling:{url}"
    with pytest.raises(ConfigError, match=said) as caught:
        make_environment(f"qa/{tmp_path}/rows.jsonl", {"scorer": name, "scorer_options": {name: settings}})
    assert "secret" not in str(caught.value)


def test_a_server_that_a_root_names_needs_consent_with_its_settings() -> None:
    def keys(**settings: Any) -> list[str]:
        options = {"scorer": ["exact", "pooling:http://host", "model:rm"], "scorer_options": settings}
        uses = sampling_uses(RunConfig(model="m", env=("qa/a.jsonl",), env_options={"qa/a.jsonl": options}))
        assert [use.setting for use in uses if use.role == "scorer"] == ["pooling:http://host", "model:rm"]
        return [use.key({}) for use in uses if use.role == "scorer" and use.is_users]

    (without,) = keys()
    (with_key,) = keys(**{"pooling:http://host": {"key_env": "AWS_SECRET_ACCESS_KEY"}})
    assert without != with_key


@pytest.mark.slow
def test_stored_rollouts_get_scores(run: ludic.Run, server: JudgeServer) -> None:
    server.reply = classify(0.5, 2.0)
    name = f"pooling:{server.url}"
    with pytest.raises(ConfigError, match="the model has 2 labels"):
        run.score(name)
    report = run.score(name, scorer_options={"label": 1})
    assert (report.scorer, report.num_scored, report.num_failed) == ("pooling", 8, 0)
    assert run.sql("select distinct value, model from scores").rows() == [(2.0, "rm")]
    server.reply = lambda handler, body: send(handler, "out of memory", 500)
    with pytest.raises(ConfigError, match="the server answered 500: 'out of memory'"):
        run.score(name, scorer_options={"label": 0, "tries": 1})
