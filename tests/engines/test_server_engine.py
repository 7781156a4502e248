"""Servers that fail, differ or are shared, on HTTP servers with vLLM's endpoints; test_engine.py asks a real vLLM."""

import asyncio
import io
import json
import logging
import shutil
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_requests import a_request
from fake_vllm import FakeVllm, Fault, listening, logprobs_of_folder
from tenacity import wait_fixed
from transformers import AutoConfig, AutoModelForCausalLM

from ludic.base.defaults import Longrope
from ludic.engines import server_loading, server_pool
from ludic.engines.config import EngineConfig
from ludic.engines.engine import Completion, GenerationRequest, generate_all
from ludic.engines.registry import EngineSetup, engine_maker
from ludic.engines.server_engine import ServerEngine
from ludic.engines.server_http import Setup
from ludic.engines.server_loading import is_claim
from ludic.errors import ConfigError, EngineError, ModelError, NoServerError
from ludic.models.families import shrink, spread
from ludic.records.rollout import WeightSpan

StartEngine = Callable[..., ServerEngine]


@pytest.fixture
def start(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartEngine]:
    """Starts engines on servers, with short waits, and closes them at the end."""
    monkeypatch.setattr(server_pool, "_PATIENCE_S", 0.3)
    monkeypatch.setattr(server_pool, "_POLL_AGAIN_S", 0.05)
    monkeypatch.setattr(server_pool, "_POLL_EVERY_S", 0.1)
    monkeypatch.setattr(server_pool, "_LOAD_AGAIN_S", 2.0)
    monkeypatch.setattr(server_pool, "wait_random_exponential", lambda **_: wait_fixed(0.01))
    with ExitStack() as engines:

        def start(*servers: FakeVllm, folder: str = model_folder, **options: Any) -> ServerEngine:
            engine = ServerEngine(folder, [server.url for server in servers], **{"run_id": "run"} | options)
            engines.callback(engine.close)
            return engine

        yield start


@pytest.fixture
def fake() -> Iterator[FakeVllm]:
    with listening(FakeVllm()) as fake:
        yield fake


@pytest.fixture
def other() -> Iterator[FakeVllm]:
    with listening(FakeVllm()) as other:
        yield other


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def one(engine: ServerEngine, **params: Any) -> Completion:
    [completion] = generate_all(engine, [a_request(**params)])
    return completion


# --- Answers -------------------------------------------------------------------------------------------------------


def with_status(status: int) -> Fault:
    return lambda answer: (status, b'{"error":{"message":"out of order"}}')


def changed(**changes: Any) -> Fault:
    return lambda answer: (200, json.dumps({"choices": [answer["choices"][0] | changes]}).encode())


GARBAGE: dict[str, Fault] = {
    "error 500": with_status(500),
    "error 503": with_status(503),
    "no JSON": lambda answer: (200, b"<html>a proxy's page</html>"),
    "no text": lambda answer: (200, b"\xff\xfe"),
    "other JSON": lambda answer: (200, b'{"choices": 3}'),
    "no completion": lambda answer: (200, b'{"choices": []}'),
    "aborted": changed(finish_reason="abort"),
    "no end": changed(finish_reason=None),
    "no tokens": changed(token_ids=[]),
    "fewer logprobs": changed(token_ids=[5] * 3),
    "too many tokens": changed(token_ids=[5] * 20),
    "tokens that are texts": changed(token_ids=["a"] * 16),
    "spans with a gap": changed(weight_versions=[{"version": "run:0", "start": 1, "end": 16}]),
    "spans too short": changed(weight_versions=[{"version": "run:0", "start": 0, "end": 15}]),
    "no spans": changed(weight_versions=[]),
    "weights of another run": changed(weight_versions=[{"version": "other:0", "start": 0, "end": 16}]),
    "unknown weights": changed(weight_versions=[{"version": "default", "start": 0, "end": 16}]),
}

TOKEN_LIES = (1_000_000, 64, -1, 2**31, 2**31 - 1, 2**63, 10**30)
"""Ids that no model of 64 tokens gives."""
LOGPROB_LIES = (5.0, 1e308, -1e308, -101.0, -9999.0, float("nan"), float("inf"))


def with_token(token: int) -> Fault:
    return changed(token_ids=[5, token, *[5] * 14])


def with_logprob(logprob: float) -> Fault:
    """In the form of both endpoints."""
    values = [-1.0, logprob, *[-1.0] * 14]
    content = [{"token_id": 5, "logprob": value, "top_logprobs": []} for value in values]
    return changed(logprobs={"content": content, "token_logprobs": values})


def with_candidate(token: int, logprob: float) -> Fault:
    own = {"token_id": 5, "logprob": -1.0}
    content = [own | {"top_logprobs": [own, {"token_id": token, "logprob": logprob}]} for _ in range(16)]
    return changed(logprobs={"content": content})


LIES = {
    **{f"token {token}": with_token(token) for token in TOKEN_LIES},
    **{f"logprob {logprob:g}": with_logprob(logprob) for logprob in LOGPROB_LIES},
}
CANDIDATE_LIES = {
    **{f"kept token {token}": with_candidate(token, -2.0) for token in TOKEN_LIES},
    **{f"logprob {logprob:g} of a kept token": with_candidate(6, logprob) for logprob in (5.0, 1e308)},
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", GARBAGE.values(), ids=GARBAGE.keys())
def test_an_answer_that_cannot_be_used_is_asked_for_again(fake: FakeVllm, start: StartEngine, fault: Fault) -> None:
    engine = start(fake)
    fake.faults = [fault]
    completion = one(engine)
    assert completion.tokens.tolist() == [5] * 16
    assert completion.weight_versions == (WeightSpan(version=0, start=0, end=16),)
    assert fake.num_completions == 2


@pytest.mark.slow
@pytest.mark.parametrize("has_generate", [True, False])
def test_tokens_and_logprobs_that_no_model_gives_are_asked_for_again(
    fake: FakeVllm, start: StartEngine, caplog: pytest.LogCaptureFixture, has_generate: bool
) -> None:
    fake.has_generate = has_generate
    engine = start(fake)
    for number, (name, lie) in enumerate(LIES.items(), start=1):
        fake.faults = [lie]
        assert one(engine).logprobs.tolist() == [-1.0] * 16, name
        assert fake.num_completions == 2 * number, name
    said = [record.getMessage() for record in caplog.records]
    assert any("can't be used: tokens from 5 to 1000000, wanted 0 to 63" in text for text in said)
    assert any(
        "can't be used: response_logprobs is 5.0 at token 1, wanted the logarithm of a probability, -100 to 0" in text
        for text in said
    )


@pytest.mark.slow
def test_kept_tokens_that_no_model_gives_are_asked_for_again(fake: FakeVllm, start: StartEngine) -> None:
    engine = start(fake)
    for number, (name, lie) in enumerate(CANDIDATE_LIES.items(), start=1):
        fake.faults = [lie, with_candidate(6, -2.0)]
        kept = one(engine, top_k=2, return_mask=True).columns["kept_tokens"]
        assert [ids.tolist() for ids in kept] == [[5, 6]] * 16, name
        assert fake.num_completions == 2 * number, name


@pytest.fixture
def mixture_folder(tmp_path: Path) -> str:
    """Two layers of four experts, two for a token, and a vocabulary of 64."""
    config = shrink(AutoConfig.for_model("qwen3_moe"))
    config.vocab_size = 64
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mixture")
    return str(tmp_path / "mixture")


def test_experts_come_as_a_file_of_numpy_and_garbage_is_asked_for_again(
    fake: FakeVllm, start: StartEngine, mixture_folder: str
) -> None:
    engine = start(fake, folder=mixture_folder, keep_experts=True)
    num_read = len(a_request().prompt_tokens) + 15
    of_server = np.tile(np.array([[3, 1], [0, 2]], np.uint8), (num_read, 1, 1))
    file = io.BytesIO()
    np.save(file, of_server)
    good = b64encode(file.getvalue()).decode()
    fake.faults = [changed(routed_experts=b64encode(b"no array").decode()), changed(routed_experts=good)]
    found = one(engine, return_experts=True).columns["experts"]
    assert (found.shape, found[0].tolist(), fake.num_completions) == ((num_read, 2, 2), [[1, 3], [0, 2]], 2)


def test_a_server_without_experts_says_how_it_has_to_be_started(
    fake: FakeVllm, start: StartEngine, mixture_folder: str
) -> None:
    engine = start(fake, folder=mixture_folder, keep_experts=True)
    with pytest.raises(ConfigError, match="returns no experts; start it with --enable-return-routed-experts, or a run"):
        one(engine, return_experts=True)
    with pytest.raises(ConfigError, match="was started without keep_experts"):
        one(start(fake), return_experts=True)


@pytest.fixture
def longrope_folder(tmp_path: Path) -> str:
    """A model of 64 tokens with its short factors, whose long ones give other logprobs in the first tokens too."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [9.0] * 8}
    config = AutoConfig.for_model(
        "phi3", vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0, original_max_position_embeddings=64,
        max_position_embeddings=512, rope_parameters=rope,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        spread(model)
    model.save_pretrained(tmp_path / "longrope")
    return str(tmp_path / "longrope")


@pytest.mark.parametrize(("longrope", "length"), [(None, 512), ("short", 65), ("long", 64)])
def test_a_server_that_takes_other_factors_than_the_run_is_refused_by_name(
    fake: FakeVllm, start: StartEngine, longrope_folder: str, longrope: Longrope | None, length: int
) -> None:
    fake.max_model_len = length
    with pytest.raises(ConfigError, match=f"{fake.url} has max_model_len {length}, by which vLLM chooses between"):
        start(fake, folder=longrope_folder, longrope=longrope)


@pytest.mark.parametrize(("longrope", "length", "other"), [("short", 64, "long"), ("long", 512, "short")])
def test_a_server_is_compared_with_the_factors_of_the_run(
    fake: FakeVllm, start: StartEngine, longrope_folder: str, longrope: Longrope, length: int, other: Longrope
) -> None:
    fake.max_model_len, fake.device_and_dtype = length, ("cpu", "float32")
    fake.logprobs_of = logprobs_of_folder(longrope_folder, longrope=longrope)
    assert start(fake, folder=longrope_folder, longrope=longrope).max_length == length
    fake.logprobs_of = logprobs_of_folder(longrope_folder, longrope=other)
    with pytest.raises(ModelError, match="its logprobs differ"):
        start(fake, folder=longrope_folder, longrope=longrope, run_id="other")


def test_a_server_that_only_lies_is_an_error_that_says_what_it_answered(
    fake: FakeVllm, start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_pool, "_MOST_ATTEMPTS", 2)
    engine = start(fake)
    fake.faults = [with_token(2**31)] * 2
    with pytest.raises(EngineError, match=r"used: a number that is not a token id .*2147483648 out of bounds"):
        one(engine)


@pytest.mark.slow
def test_answers_that_can_never_be_used_are_an_error(
    fake: FakeVllm, start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_pool, "_MOST_ATTEMPTS", 3)
    engine = start(fake)
    fake.faults = [with_status(500)] * 100
    with pytest.raises(EngineError, match=r"127.0.0.1:\d+/inference/v1/generate answered 500: .*out of order"):
        one(engine)
    assert fake.num_completions == 3


def test_a_request_that_the_server_refuses_is_not_sent_again(fake: FakeVllm, start: StartEngine) -> None:
    engine = start(fake)
    fake.faults = [with_status(400)]
    with pytest.raises(ConfigError, match=r"answered 400: .*out of order"):
        one(engine)
    assert fake.num_completions == 1


def test_labels_of_one_version_make_one_span_and_a_newer_version_another(fake: FakeVllm, start: StartEngine) -> None:
    engine = start(fake)
    spans = [("run:3", 0, 4), ("run:3 <- 4 by a", 4, 6), ("run:4", 6, 16)]
    fake.faults = [
        changed(weight_versions=[dict(zip(("version", "start", "end"), span, strict=True)) for span in spans])
    ]
    assert one(engine).weight_versions == (
        WeightSpan(version=3, start=0, end=6),
        WeightSpan(version=4, start=6, end=16),
    )


def test_nan_logprobs_are_an_error_that_names_the_version_if_all_answers_have_them(
    fake: FakeVllm, start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_pool, "_MOST_ATTEMPTS", 2)
    engine = start(fake)
    content = [{"token_id": 5, "logprob": -9999.0, "top_logprobs": []}] * 16
    fake.faults = [changed(logprobs={"content": content})] * 2
    with pytest.raises(ModelError, match="weights of version 0 give NaN"):
        one(engine)
    assert fake.num_completions == 2


def test_a_cancelled_request_is_closed_at_the_server(fake: FakeVllm, start: StartEngine) -> None:
    engine = start(fake)
    fake.hangs.set()

    async def cancel() -> None:
        task = asyncio.ensure_future(engine.generate(a_request()))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    wait_until(lambda: fake.num_given_up == 1)
    fake.hangs.clear()
    assert one(engine).tokens.tolist() == [5] * 16


# --- A server without /inference/v1/generate ------------------------------------------------------------------------


def test_a_server_without_the_tokens_endpoint_is_asked_for_completions_of_tokens(
    fake: FakeVllm, start: StartEngine
) -> None:
    fake.has_generate = False
    completion = one(start(fake, version=7))
    assert completion.tokens.tolist() == [5] * 16
    assert completion.logprobs.tolist() == [-1.0] * 16
    assert completion.weight_versions == (WeightSpan(version=7, start=0, end=16),)


@pytest.mark.slow
def test_weights_that_change_within_such_a_completion_are_noticed(fake: FakeVllm, start: StartEngine) -> None:
    fake.has_generate = False
    engine = start(fake)

    def change(answer: dict[str, Any]) -> tuple[int, bytes]:
        fake.label = "run:1"
        return 200, json.dumps(answer).encode()

    fake.faults = [change]
    assert one(engine).weight_versions == (WeightSpan(version=1, start=0, end=16),)
    assert fake.num_completions == 2


# --- Servers that were started wrongly ------------------------------------------------------------------------------


def test_raw_logprobs_are_refused_with_the_flags(fake: FakeVllm, start: StartEngine) -> None:
    fake.raw_logprobs = True
    with pytest.raises(ConfigError, match=r"with top_k 1 the logprob is -1, wanted 0.*--logprobs-mode processed_log"):
        start(fake)


def test_a_server_whose_weights_cannot_be_changed_is_refused_with_the_flags(fake: FakeVllm, start: StartEngine) -> None:
    fake.has_weights_endpoints = False
    with pytest.raises(ConfigError, match=r"no /weight_info.*VLLM_SERVER_DEV_MODE=1 vllm serve.*ludic serve ROOT"):
        start(fake)


def test_a_server_of_a_smaller_model_is_refused(fake: FakeVllm, start: StartEngine, monkeypatch: Any) -> None:
    monkeypatch.setattr(fake, "_generate", lambda body: (400, b"Token id 63 is out of vocabulary"))
    with pytest.raises(ConfigError, match="the run's model has 64 tokens, so this server seems to have another model"):
        start(fake)


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ((), "set --server-url http://HOST:8000"),
        (("node1:8000",), "server_url is node1:8000, which is not the URL of a server"),
        (("ftp://node1",), "wanted one such as http://node1:8000"),
        (("http://",), "not the URL of a server"),
        (("ftp://me:secret@node1",), "server_url is ftp://node1, which"),
        (("http://me:secret@node1",), "server_url is http://node1, which"),
    ],
)
def test_wrong_urls_are_refused(model_folder: str, urls: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerEngine(model_folder, urls)


def test_unknown_options_are_refused(model_folder: str) -> None:
    config = EngineConfig(engine="server", server_url=("http://node1:8000",), engine_options={"max_model_len": 5})
    with pytest.raises(ConfigError, match="engine server has no option max_model_len, only request_timeout_s"):
        engine_maker(EngineSetup(config=config))(model_folder, 0)


def test_no_server_is_an_error_that_says_so_without_the_login(
    start: StartEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = FakeVllm()
    with listening(gone):
        port = gone.url.rpartition(":")[2]
    monkeypatch.setenv("LUDIC_SERVER_LOGIN", "me:secret")
    with pytest.raises(NoServerError, match=rf"^http://127.0.0.1:{port} does not answer \(ConnectError") as error:
        start(gone)
    assert "secret" not in str(error.value) + caplog.text
    assert len(caplog.records) == 1


# --- Several servers ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_requests_go_to_the_server_with_the_fewest(fake: FakeVllm, other: FakeVllm, start: StartEngine) -> None:
    fake.latency_s, other.latency_s = 1.5, 0.05  # a busy machine adds a tenth to each
    engine = start(fake, other, max_batch=4)
    wait_until(lambda: all(member.is_ready for member in engine._pool._members))
    generate_all(engine, [a_request(seed=seed) for seed in range(60)])
    assert fake.num_completions + other.num_completions == 60
    assert other.num_completions > 2 * fake.num_completions > 0


@pytest.mark.slow
def test_requests_of_a_server_that_dies_go_to_the_others(
    other: FakeVllm, start: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    dying = FakeVllm()
    dying.latency_s = other.latency_s = 0.05
    with ThreadPoolExecutor(1) as thread:
        with listening(dying):
            engine = start(dying, other, max_batch=4)
            wait_until(lambda: all(member.is_ready for member in engine._pool._members))
            sampling = thread.submit(generate_all, engine, [a_request(seed=seed) for seed in range(60)])
            wait_until(lambda: dying.num_completions > 4)
        assert len(sampling.result()) == 60
    assert f"{dying.url} does not answer" in caplog.text
    assert "its requests go to the other servers" in caplog.text


@pytest.mark.slow
def test_requests_wait_for_the_only_server_and_its_weights_are_loaded_first(
    start: StartEngine, model_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    fake = FakeVllm()
    with listening(fake):
        engine = start(fake, version=3)
        assert one(engine).policy_version == 3
    port = int(fake.url.rpartition(":")[2])
    with ThreadPoolExecutor(1) as thread:
        sampling = thread.submit(one, engine)
        time.sleep(0.5)
        assert not sampling.done()
        fake.restart()
        with listening(fake, port):
            assert sampling.result().weight_versions == (WeightSpan(version=3, start=0, end=16),)
    assert len(fake.loads) == 2
    assert caplog.text.count("its requests wait for a server") == 1
    assert caplog.text.count("gets requests again") == 1


def test_a_server_that_was_restarted_unseen_loads_before_its_tokens_count(fake: FakeVllm, start: StartEngine) -> None:
    engine = start(fake, version=3)
    fake.restart()
    assert one(engine).weight_versions == (WeightSpan(version=3, start=0, end=16),)
    assert len(fake.loads) == 2


# --- Prefixes of servers --------------------------------------------------------------------------------------------


def a_prompt(seed: int, length: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 64, length).astype(np.int32)


@pytest.fixture
def both(
    fake: FakeVllm, other: FakeVllm, start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> tuple[ServerEngine, list[list[bytes]]]:
    """An engine on two servers, and the prompts that each of them got."""
    engine, seen = start(fake, other, max_batch=128), list[list[bytes]]()
    wait_until(lambda: all(member.is_ready for member in engine._pool._members))

    def note(server: FakeVllm, prompts: list[bytes]) -> None:
        generate = server._generate

        def noted(body: dict[str, Any]) -> dict[str, Any]:
            if not server._is_check(body):
                prompts.append(np.array(body["token_ids"], np.int32).tobytes())
            return generate(body)

        monkeypatch.setattr(server, "_generate", noted)

    for server in (fake, other):
        seen.append([])
        note(server, seen[-1])
    return engine, seen


def sample_together(engine: ServerEngine, requests: list[GenerationRequest], *servers: FakeVllm) -> list[Completion]:
    """Sample on servers that answer when all requests are on their way."""
    for server in servers:
        server.hangs.set()
    with ThreadPoolExecutor(1) as thread:
        sampling = thread.submit(generate_all, engine, requests)
        wait_until(lambda: sum(len(member.calls) for member in engine._pool._members) == len(requests))
        for server in servers:
            server.hangs.clear()
        return sampling.result()


@pytest.mark.slow
def test_the_members_of_a_group_and_their_next_turns_go_to_one_server(
    fake: FakeVllm, other: FakeVllm, both: tuple[ServerEngine, list[list[bytes]]]
) -> None:
    engine, seen = both
    first = [a_request(a_prompt(group), seed=seed) for group in range(8) for seed in range(8)]
    answers = sample_together(engine, first, fake, other)
    assert [len(prompts) for prompts in seen] == [32, 32]
    second = [
        a_request(np.concatenate([request.prompt_tokens, answer.tokens, a_prompt(100 + turn, 32)]), seed=turn)
        for turn, (request, answer) in enumerate(zip(first, answers, strict=True))
    ]
    sample_together(engine, second, fake, other)
    beginnings = [{prompt[: 4 * 64] for prompt in prompts} for prompts in seen]
    assert [len(of_server) for of_server in beginnings] == [4, 4]
    assert not beginnings[0] & beginnings[1]


def test_a_prompt_goes_where_most_of_it_is_with_the_completion(both: tuple[ServerEngine, list[list[bytes]]]) -> None:
    engine, seen = both
    # The second prompt, at the second server, has no whole block; prompt and completion have two.
    [_, answer] = generate_all(engine, [a_request(a_prompt(0)), a_request(a_prompt(1, 8), max_tokens=25)])
    turn = np.concatenate([a_prompt(1, 8), answer.tokens, a_prompt(2, 16)])
    generate_all(engine, [a_request(turn)])
    assert [turn.tobytes() in prompts for prompts in seen] == [False, True]


@pytest.mark.slow
def test_a_prefix_that_all_requests_share_is_soon_at_all_servers(
    fake: FakeVllm, other: FakeVllm, both: tuple[ServerEngine, list[list[bytes]]]
) -> None:
    engine, seen = both
    sample_together(engine, [a_request(a_prompt(0), seed=seed) for seed in range(100)], fake, other)
    assert [len(prompts) for prompts in seen] == [50, 50]


@pytest.mark.slow
def test_a_server_that_has_all_prefixes_does_not_get_all_requests(
    fake: FakeVllm, other: FakeVllm, both: tuple[ServerEngine, list[list[bytes]]]
) -> None:
    engine, seen = both
    prompts = [a_prompt(seed) for seed in range(100)]
    for prompt in prompts:  # an idle pool takes its first server
        generate_all(engine, [a_request(prompt)])
    assert [len(of_server) for of_server in seen] == [100, 0]
    sample_together(engine, [a_request(prompt) for prompt in prompts], fake, other)
    # n to the first server while it has at most max(16, m / 2) more than the m of the other one.
    assert [len(of_server) - 100 * (index == 0) for index, of_server in enumerate(seen)] == [60, 40]


@pytest.mark.slow
def test_a_full_server_gets_a_few_more_requests_whose_prefix_it_has_while_another_one_has_room(
    fake: FakeVllm, other: FakeVllm, start: StartEngine
) -> None:
    engine = start(fake, other, max_batch=32)
    wait_until(lambda: all(member.is_ready for member in engine._pool._members))
    generate_all(engine, [a_request(a_prompt(0))])  # at the first server
    fake.hangs.set()
    other.hangs.set()
    num_calls = lambda: [len(member.calls) for member in engine._pool._members]  # noqa: E731
    with ThreadPoolExecutor(2) as threads:
        fill = threads.submit(generate_all, engine, [a_request(a_prompt(seed)) for seed in range(1, 61)])
        wait_until(lambda: num_calls() == [30, 30])
        more = threads.submit(generate_all, engine, [a_request(a_prompt(0), seed=seed) for seed in range(20)])
        # 32 / 16 = 2 above 32; the others go to the second one until it is full, and the rest waits.
        wait_until(lambda: num_calls() == [34, 32])
        time.sleep(0.1)
        assert num_calls() == [34, 32]
        fake.hangs.clear()
        other.hangs.clear()
        assert (len(fill.result()), len(more.result())) == (60, 20)


@pytest.mark.parametrize("event", ["new weights", "restart"])
def test_nothing_is_believed_of_a_server_with_new_weights_or_after_a_restart(
    other: FakeVllm, both: tuple[ServerEngine, list[list[bytes]]], other_weights: str, event: str
) -> None:
    engine, seen = both
    prompt = a_prompt(0)
    generate_all(engine, [a_request(a_prompt(1)), a_request(prompt)])  # the second server gets the second one
    generate_all(engine, [a_request(prompt)])
    assert [of_server.count(prompt.tobytes()) for of_server in seen] == [0, 2]
    if event == "restart":
        other.restart()
        wait_until(lambda: len(other.loads) == 2)
    else:
        engine.load_weights(other_weights, 1)
    wait_until(lambda: all(member.is_ready for member in engine._pool._members))
    generate_all(engine, [a_request(prompt)])  # to the first server, like any new prompt
    assert [of_server.count(prompt.tobytes()) for of_server in seen] == [1, 2]


# --- Weights --------------------------------------------------------------------------------------------------------


def test_a_load_says_what_it_does_and_then_that_it_is_done(
    fake: FakeVllm, start: StartEngine, other_weights: str
) -> None:
    engine = start(fake)
    engine.load_weights(other_weights, 1)
    assert fake.loads[1:] == [other_weights]
    assert fake.labels[2].startswith("run:0 <- 1 by ")
    assert fake.labels[3:] == ["run:1"]
    assert not fake.is_paused
    assert (engine.policy_version, one(engine).policy_version) == (1, 1)


def test_the_newest_version_wins(fake: FakeVllm, start: StartEngine, other_weights: str) -> None:
    ahead, behind = start(fake), start(fake)
    assert len(fake.loads) == 1  # the second found the version there
    ahead.load_weights(other_weights, 5)
    behind.load_weights(other_weights, 4)
    assert fake.label == "run:5"
    assert len(fake.loads) == 2
    assert (behind.policy_version, one(behind).policy_version) == (4, 5)


@pytest.mark.slow
def test_workers_that_load_a_version_at_the_same_time_load_it_once(
    fake: FakeVllm, start: StartEngine, other_weights: str
) -> None:
    engines = [start(fake) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda engine: engine.load_weights(other_weights, 1), engines))
    assert fake.label == "run:1"
    assert fake.loads[1:] == [other_weights]


def test_weights_of_another_run_are_replaced(fake: FakeVllm, start: StartEngine) -> None:
    fake.label = "another:100"
    assert one(start(fake, version=2)).policy_version == 2
    assert fake.label == "run:2"


@pytest.fixture
def soon_abandoned(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets workers soon look into what another one left, and wait for it."""
    monkeypatch.setattr(server_loading, "_STALE_S", 0.3)
    monkeypatch.setattr(server_pool, "_ABANDONED_S", 0.3)
    monkeypatch.setattr(server_pool, "_PATIENCE_S", 20.0)


@pytest.mark.slow
@pytest.mark.usefixtures("soon_abandoned")
def test_a_load_that_its_worker_left_unfinished_is_taken_over(fake: FakeVllm, start: StartEngine) -> None:
    fake.label, fake.is_paused = "run:1 <- 2 by 0123456789ab", True
    engine = start(fake, version=1)
    assert fake.label == "run:1"
    assert one(engine).policy_version == 1


@pytest.mark.slow
@pytest.mark.usefixtures("soon_abandoned")
def test_a_server_that_its_worker_left_paused_after_a_load_goes_on(fake: FakeVllm, start: StartEngine) -> None:
    fake.label, fake.is_paused = "run:1", True  # named, and killed before the resume
    engine = start(fake, version=1)
    assert one(engine).policy_version == 1
    fake.is_paused = True
    assert one(engine).policy_version == 1
    assert not fake.is_paused


def test_a_load_that_became_stale_before_its_pause_changes_nothing(
    fake: FakeVllm, start: StartEngine, other_weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, make_load_check = start(fake), server_loading.make_load_check

    def late(*args: Any, **options: Any) -> Any:
        fake.label = "run:2"  # another worker has loaded meanwhile
        return make_load_check(*args, **options)

    monkeypatch.setattr(server_loading, "make_load_check", late)
    num_loads = len(fake.loads)
    engine.load_weights(other_weights, 1)
    assert len(fake.loads) == num_loads
    assert not fake.is_paused
    assert one(engine).policy_version == 2


def test_weights_that_a_late_load_replaced_get_no_requests_and_no_pause_is_left(
    fake: FakeVllm, start: StartEngine, other_weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, load = start(fake), fake._load

    def late(body: dict[str, Any]) -> Any:
        if "run:2" not in fake.labels:
            fake._set_label({"new_version": "run:2"})  # another worker has loaded, and resumed, before this one's pause
        return load(body)

    monkeypatch.setattr(fake, "_load", late)
    engine.load_weights(other_weights, 1)
    assert fake.labels[-3] == server_loading.HALF_LOADED
    assert fake.labels[-1] == "run:1"
    assert fake.loads[-2:] == [other_weights, other_weights]
    assert not fake.is_paused
    assert one(engine).policy_version == 1


@pytest.mark.slow
def test_a_load_that_fails_on_one_server_leaves_it_without_requests_until_one_succeeds(
    fake: FakeVllm, other: FakeVllm, start: StartEngine, other_weights: str
) -> None:
    engine = start(fake, other)
    wait_until(lambda: all(member.is_ready for member in engine._pool._members))
    fake.fails_loads = True
    engine.load_weights(other_weights, 1)
    versions = {c.policy_version for c in generate_all(engine, [a_request(seed=seed) for seed in range(10)])}
    assert versions == {1}
    assert (fake.num_completions, other.num_completions) == (0, 10)
    assert fake.label == "half loaded"
    assert not fake.is_paused
    fake.fails_loads = False
    wait_until(lambda: fake.label == "run:1")


def test_a_load_that_fails_on_all_servers_is_an_error_and_the_version_before_is_loaded_again(
    fake: FakeVllm, start: StartEngine, other_weights: str, model_folder: str
) -> None:
    engine = start(fake)
    fake.fails_loads = True
    with pytest.raises(ModelError, match=r"could not load .*it must see this folder.*ludic serve ROOT"):
        engine.load_weights(other_weights, 1)
    fake.fails_loads = False
    assert engine.policy_version == 0
    assert one(engine).policy_version == 0
    assert fake.loads == [model_folder, model_folder]


@pytest.mark.slow
def test_whatever_fails_in_a_load_leaves_no_claim_and_no_label_of_weights_that_were_not_compared(
    fake: FakeVllm, start: StartEngine, other_weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_pool, "_LOAD_AGAIN_S", 0.2)
    fake.device_and_dtype, fake.has_extension = ("cpu", "float32"), True
    engine, answer = start(fake), fake.answer
    changes: list[str] = []
    """What is asked for after a claim that changes the server."""
    failing = -1
    """The index of the one that fails."""

    def fail(method: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if method == "POST" and (changes or is_claim(fake.label)):
            changes.append(path)
            if len(changes) - 1 == failing:
                return 500, b'{"error":{"message":"out of order"}}'
        return answer(method, path, body)

    monkeypatch.setattr(fake, "answer", fail)
    engine.load_weights(other_weights, 1)
    steps = changes.copy()
    assert len(steps) == 5
    for version, step in enumerate(steps, start=2):
        failing, num_labels = steps.index(step), len(fake.labels)
        changes.clear()
        with pytest.raises(ModelError, match="out of order"):
            engine.load_weights(other_weights, version)
        assert one(engine).policy_version == 1  # at once, not when a claim has become stale
        left = [label for label in fake.labels[num_labels:] if not is_claim(label) and label != f"run:{version}"]
        assert left[0] == ("run:1" if step == "/pause" else server_loading.HALF_LOADED), step
        assert (fake.label, fake.is_paused) == ("run:1", False), step


def test_files_that_go_after_the_claim_change_nothing(
    fake: FakeVllm, start: StartEngine, other_weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, set_label = shutil.copytree(other_weights, tmp_path / "policy"), fake._set_label
    fake.device_and_dtype, fake.has_extension = ("cpu", "float32"), True
    engine = start(fake)

    def claim(body: dict[str, Any]) -> dict[str, Any]:
        shutil.rmtree(folder, ignore_errors=True)
        return set_label(body)

    monkeypatch.setattr(fake, "_set_label", claim)
    with pytest.raises(ModelError, match=r"policy: no config\.json that transformers can use"):
        engine.load_weights(str(folder), 1)
    assert fake.labels[-2].startswith("run:0 <- 1 by ")
    assert fake.labels[-1] == "run:0"
    assert one(engine).policy_version == 0
    assert len(fake.loads) == 1


@pytest.mark.slow
def test_weights_that_are_gone_when_a_server_starts_again_are_an_error(
    fake: FakeVllm, start: StartEngine, other_weights: str, tmp_path: Any
) -> None:
    folder = tmp_path / "policy"
    folder.symlink_to(other_weights)
    engine = start(fake)
    engine.load_weights(str(folder), 1)
    engine._pool._wanted = server_loading.Wanted(engine._pool._wanted.weights, str(tmp_path / "gone"))
    fake.restart()
    with pytest.raises(ModelError, match="gone: there is no such folder"):
        one(engine)


def test_workers_load_nothing_into_a_server_of_ludic_serve(
    fake: FakeVllm, start: StartEngine, other_weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.model, fake.label = "ludic-serve", "run:0"
    engine = start(fake)
    with pytest.raises(
        NoServerError, match="holds weights 'run:0', wanted 'run:1' or newer; does its `ludic serve` run"
    ):
        engine.load_weights(other_weights, 1)
    assert engine.policy_version == 0
    threading.Timer(0.1, setattr, (fake, "label", "run:2")).start()
    engine.load_weights(other_weights, 1)
    assert (engine.policy_version, one(engine).policy_version) == (1, 2)
    assert fake.loads == []


def test_prompts_share_their_prefix_only_under_the_same_weights(
    fake: FakeVllm, start: StartEngine, monkeypatch: Any
) -> None:
    salts, generate = [], fake._generate
    monkeypatch.setattr(fake, "_generate", lambda body: (salts.append(body["cache_salt"]), generate(body))[1])
    engine = start(fake, version=3)
    one(engine)
    assert [salt for salt in salts if not salt.startswith("check ")] == ["check", "run:3"]


@pytest.mark.slow
@pytest.mark.usefixtures("soon_abandoned")
def test_a_worker_that_is_long_about_a_load_keeps_its_claim(
    fake: FakeVllm, start: StartEngine, other_weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, make_load_check = [start(fake), start(fake)], server_loading.make_load_check

    async def long(*args: Any, **options: Any) -> Any:
        await asyncio.sleep(2.0)  # others look into a claim that has not changed for 0.3 s
        return await make_load_check(*args, **options)

    monkeypatch.setattr(server_loading, "make_load_check", long)
    num_loads = len(fake.loads)
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda engine: engine.load_weights(other_weights, 1), engines))
    assert len(fake.loads) == num_loads + 1
    assert [one(engine).policy_version for engine in engines] == [1, 1]


def test_a_server_that_dies_at_long_prompts_is_refused(fake: FakeVllm, start: StartEngine) -> None:
    fake.device_and_dtype, fake.has_extension, fake.cuts_prompts = ("cpu", "float32"), True, True
    with pytest.raises(ConfigError, match=r"long prompts in parts.*start it with --no-enable-chunked-prefill"):
        start(fake)
    fake.device_and_dtype = ("cuda", "float32")
    assert one(start(fake)).policy_version == 0


# --- Logprobs after a load -----------------------------------------------------------------------------------------


OLD_HEAD, OTHER_LOGPROBS = "keeps the old head of a model with tied embeddings", "its logprobs differ by up to"
UNKNOWN_DEVICE = f"/server_info does not tell its device, and on a CPU, vLLM {OLD_HEAD}"


@pytest.mark.parametrize(
    ("told", "has_extension", "off_by", "problem"),
    [
        (("cpu", "float32"), True, 0.0, None),
        (("cpu", "float32"), True, 0.002, OTHER_LOGPROBS),
        (("cpu", "float32"), False, 0.0, OLD_HEAD),
        (("cpu", "bfloat16"), True, 0.2, None),
        (("cpu", "bfloat16"), True, 0.4, OTHER_LOGPROBS),
        (("cuda", "float32"), False, 0.0, None),
        (("cuda", "float32"), False, 0.002, OTHER_LOGPROBS),
        (("cuda", "float16"), False, 0.2, OTHER_LOGPROBS),
        (("cuda", "bfloat16"), False, 0.2, None),
        ((None, "float32"), True, 0.0, None),
        ((None, "float32"), True, 0.002, OTHER_LOGPROBS),
        ((None, "float32"), False, 0.0, UNKNOWN_DEVICE),
        (None, True, 0.0, None),
        (None, True, 0.4, OTHER_LOGPROBS),
        (None, False, 0.0, UNKNOWN_DEVICE),
    ],
)
def test_a_load_that_leaves_other_weights_is_refused(
    fake: FakeVllm,
    start: StartEngine,
    model_folder: str,
    told: tuple[str | None, str] | None,
    has_extension: bool,
    off_by: float,
    problem: str | None,
) -> None:
    fake.device_and_dtype, fake.has_extension = told, has_extension
    fake.logprobs_of = logprobs_of_folder(model_folder, off_by)
    if problem is None:
        assert one(start(fake)).policy_version == 0
        return
    with pytest.raises(ModelError, match=f"gets no requests after loading .*{problem}.*--worker-extension-cls ludic"):
        start(fake)
    assert fake.label == server_loading.HALF_LOADED
    assert not fake.is_paused


@pytest.mark.parametrize(
    ("family", "device", "wrong"),
    [
        ("gpt_oss", "cuda", "vLLM keeps the old experts of gpt-oss"),
        ("qwen3_moe", "cpu", "on a CPU, vLLM misplaces the new experts of a mixture"),
        ("qwen3_moe", "cuda", None),
        ("llama", "cpu", None),
    ],
)
def test_what_vllms_own_load_gets_wrong_of_a_family_is_known(
    tmp_path: Path, family: str, device: str, wrong: str | None
) -> None:
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    setup = Setup(device=device, dtype="bfloat16")
    check = asyncio.run(server_loading.make_load_check(str(tmp_path), setup, is_first=False))
    assert check.wrong_without_extension == wrong


@pytest.mark.parametrize(("device", "is_noticed"), [("cpu", True), (None, True), ("cuda", False)])
def test_each_load_is_compared_on_a_cpu_and_the_first_one_elsewhere(
    fake: FakeVllm, start: StartEngine, model_folder: str, other_weights: str, device: str | None, is_noticed: bool
) -> None:
    fake.device_and_dtype, fake.has_extension = (device, "float32"), True
    fake.logprobs_of = logprobs_of_folder(model_folder)  # and it computes with these for ever
    engine = start(fake)
    if not is_noticed:
        engine.load_weights(other_weights, 1)
        fake.restart()  # its next load is a first one again
        wait_until(lambda: fake.label == server_loading.HALF_LOADED)
        return
    with pytest.raises(ModelError, match=OTHER_LOGPROBS):
        engine.load_weights(other_weights, 1)
    assert engine.policy_version == 0


def test_large_weights_are_not_read_a_second_time_but_the_extension_is_asked_for(
    fake: FakeVllm, start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_loading, "_MOST_COMPARED_BYTES", 1000)
    fake.device_and_dtype = ("cpu", "float32")
    with pytest.raises(ModelError, match=OLD_HEAD):
        start(fake)
    fake.restart()
    fake.has_extension = True
    assert one(start(fake)).logprobs.tolist() == [-1.0] * 16
