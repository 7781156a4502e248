"""Keys and passwords: no setting that is a URL takes one, and no error shows one that a server repeats."""

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args, get_type_hints

import httpx2
import pytest
from engine_requests import a_request
from secret_forms import KEY, forms_of, leaked
from strategies import make_batch
from tiny_runs import create_root, make_model

import ludic
from ludic.adapters.imports.records import open_file
from ludic.adapters.judge import JudgeScorer
from ludic.app.cli.commands import COMMANDS
from ludic.app.cli.main import main
from ludic.app.launch.config import ClusterConfig
from ludic.base import masking
from ludic.base.masking import SERVER_LOGIN, keep_secret
from ludic.engines.config import EngineConfig
from ludic.engines.server_engine import ServerEngine
from ludic.engines.server_http import Server
from ludic.errors import ConfigError, LudicError
from ludic.eval.scoring.options import ScoreOptions
from ludic.root.root import Root
from ludic.root.storage.failures import explain
from ludic.run import run_json
from ludic.run.config import RunConfig
from ludic.settings.kinds import CLUSTER_SYSTEM, find
from ludic.settings.table import check_urls, groups_in
from ludic.training.config import TrainConfig

URL = "http://me:hunter2/x@node1:8000/v1"
SYSTEMS = {
    "slurm": ClusterConfig(setup="true"),
    "kubernetes": ClusterConfig(image="me/ludic"),
}


@pytest.fixture(autouse=True)
def only_these(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_given", set())
    monkeypatch.setenv("THE_KEY", KEY.replace('"', "+"))  # a header can't hold the quote


THE_KEY = KEY.replace('"', "+")


# --- Settings ------------------------------------------------------------------------------------------------------


def settings_classes() -> Iterator[type]:
    """Yield the dataclasses of all commands' flags, inner ones too."""
    waiting = [kind for command in COMMANDS.values() for kind in groups_in(command.operation).values()]
    seen: set[type] = set()
    while waiting:
        kind = waiting.pop()
        if kind not in seen:
            seen.add(kind)
            yield kind
            hints = get_type_hints(kind).values()
            waiting += [each for hint in hints for each in (hint, *get_args(hint)) if is_dataclass(each)]


def holding(kind: type, name: str, hint: Any) -> Any:
    """An instance with a URL in one of its fields; made by its class, if that checks itself."""
    value: Any = {"inner": [URL]} if "Mapping" in str(hint) or "dict" in str(hint) else URL
    value = (URL,) if "tuple[" in str(hint) or "list[" in str(hint) else value
    if kind is not RunConfig:
        needed = {"format": "jsonl", "prompt": "x"}
        given = {each.name: needed[each.name] for each in fields(kind) if each.name in needed}
        return kind(**given | {name: value})
    made = object.__new__(kind)
    for field in fields(kind):
        object.__setattr__(made, field.name, value if field.name == name else None)
    return made


TEXTS = [
    (kind, name, hint)
    for kind in settings_classes()
    for name, hint in get_type_hints(kind).items()
    if any(part in str(hint) for part in ("str", "Mapping")) and "ClassVar" not in str(hint) and not is_dataclass(hint)
]


@pytest.mark.parametrize(("kind", "name", "hint"), TEXTS, ids=lambda each: getattr(each, "__qualname__", str(each)))
def test_no_setting_takes_a_url_with_a_password(kind: type, name: str, hint: Any) -> None:
    with pytest.raises(ConfigError) as error:
        check_urls(holding(kind, name, hint))  # which the command line does with the flags of every command
    assert name.rstrip("_") in str(error.value)
    assert "hunter2" not in str(error.value)


def test_no_root_is_made_with_a_password(tmp_path: Path) -> None:
    for settings in ({"tools": (f"mcp:{URL}",)}, {"env_options": {"x": {"url": URL}}}, {"model": URL}):
        with pytest.raises(ConfigError, match="holds a user, a password or a key"):
            run_json.create_root(str(tmp_path / "run"), RunConfig(**{"model": "tiny", "env": ("x",), **settings}))
    assert not (tmp_path / "run").exists()


def test_the_command_line_checks_all_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for command in (["watch", URL, "--totals"], ["report", "x", "--output", URL], ["view", "x", URL]):
        with pytest.raises(SystemExit):
            main(command)
        said = capsys.readouterr().err
        assert "holds a user, a password or a key (http://node1:8000/v1)" in said
        assert "hunter2" not in said


def test_no_file_is_read_from_a_url_with_a_password() -> None:
    for read in (open_file, ludic.open, Root.open):
        with pytest.raises(ConfigError) as error:
            read("http://me:hunter2@host/x.jsonl?sig=1")
        assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_no_job_file_holds_a_secret(system: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = create_root(str(tmp_path / "run"), make_model(tmp_path / "model"))
    root = root if system == "slurm" else bucket_like(root)
    train, cluster = TrainConfig.of(num_steps=3), SYSTEMS[system]
    for engine in ({"engine_options": {"hf_token": "hf_1"}}, {"engine_options": {"inner": {"api_key": "1"}}}):
        with pytest.raises(
            ConfigError, match=r"(hf_token|api_key) is or holds a secret, and `ludic cluster` writes none"
        ):
            find(CLUSTER_SYSTEM, system).files(root, train, EngineConfig(engine="vllm", **engine), cluster)
    if system != "kubernetes":
        for setup in ("true; export HF_TOKEN='hf_1'", f"git clone {URL}"):
            with pytest.raises(ConfigError, match="holds a"):
                find(CLUSTER_SYSTEM, system).files(root, train, EngineConfig(), replace(cluster, setup=setup))
        find(CLUSTER_SYSTEM, system).files(
            root, train, EngineConfig(), replace(cluster, setup='export HF_TOKEN="$(cat token)"')
        )
    for name in masking.VARIABLES:
        monkeypatch.setenv(name, f"me:{KEY}")
    engine_config = EngineConfig(engine="server", server_url=("http://node1:8000",))
    for text in find(CLUSTER_SYSTEM, system).files(root, train, engine_config, cluster).values():
        assert leaked(text) == []


def bucket_like(root: Root) -> Root:
    """The root as if it were no folder of this machine."""

    class Remote(Root):
        __slots__ = ()
        is_local = False

    return Remote(root.url, root.fs, root.path, run_json=root.run_json)


# --- Answers of servers ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Echo:
    """A server that repeats the key, in one form, in every text that it may send."""

    url: str = ""
    status: int = 200
    body: bytes = b""
    headers: list[str] = None  # type: ignore[assignment]


@contextmanager
def echoing() -> Iterator[Echo]:
    echo = Echo(headers=[])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            echo.headers.append(self.headers["Authorization"])
            self.send_response(echo.status)
            self.send_header("Content-Length", str(len(echo.body)))
            self.end_headers()
            self.wfile.write(echo.body)

        do_GET = do_POST  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        echo.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield echo
        server.shutdown()


def bodies(text: str) -> Iterator[tuple[int, bytes]]:
    """Yield answers that repeat a text: refusals, with the text across the cut, and successes of each kind."""
    for status, before in ((401, 0), (404, 165), (500, 190), (400, 290)):
        yield status, ("." * before + text).encode()
    choice = {"finish_reason": text, "token_ids": [5], "message": {"content": "." * 170 + text}}
    logprobs = {"content": [{"logprob": -1.0, "top_logprobs": []}], "token_logprobs": [-1.0]}
    span = {"version": text, "start": 0, "end": 2}
    facts = {"version": text, "weight_version": text, "is_paused": False, "data": [{"id": text}]}
    for more in ({}, {"finish_reason": "length"}, {"finish_reason": "stop", "weight_versions": [span]}):
        yield 200, json.dumps({"choices": [{**choice, "logprobs": logprobs, **more}], **facts}).encode()
    yield 200, f'{{"choices": [{{"message": "{text}'.encode()
    yield 200, json.dumps(text).encode()


FORMS = ("plain", "JSON with \\/", "percent", "url-safe base64 1", "repr")
"""Forms that a server sends; test_masking.py tries all."""
CALLS: dict[str, tuple[Any, ...]] = {
    "set_label": ("run:1",),
    "reload": ("/folder",),
    "generate": (a_request(max_tokens=1), {}, "salt"),
    "complete": (a_request(max_tokens=1), {}, "salt", "model"),
}
METHODS = [name for name, each in inspect.getmembers(Server, inspect.iscoroutinefunction) if not name.startswith("_")]


@pytest.mark.slow
def test_no_error_and_no_answer_of_a_vllm_server_shows_the_key() -> None:
    keep_secret(THE_KEY)

    async def ask(echo: Echo) -> list[str]:
        said = []
        async with httpx2.AsyncClient(trust_env=False) as client:
            for method in METHODS:
                server = Server(echo.url, client, 5.0)
                try:
                    said.append(repr(await getattr(server, method)(*CALLS.get(method, ()))))
                except LudicError as error:
                    said += [str(error), repr(error.__cause__)]
        return said

    with echoing() as echo:
        for form in FORMS:
            for echo.status, echo.body in bodies(forms_of(THE_KEY)[form]):
                for said in asyncio.run(ask(echo)):
                    assert leaked(said, THE_KEY) == [], (form, echo.body, said)


def test_no_stored_failure_of_a_judge_shows_the_key(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("{prompt}")
    [rollout] = make_batch(rewards=[[1.0]]).groups[0].rollouts
    with echoing() as echo:
        options = ScoreOptions(
            judge_url=echo.url,
            judge_model="big",
            judge_prompt=str(tmp_path / "prompt.txt"),
            judge_tries=1,
            judge_key_env="THE_KEY",
        )
        for judge in (JudgeScorer(options), JudgeScorer(replace(options, judge_pattern=r"Score: (\d)"))):
            for form in FORMS:
                for echo.status, echo.body in bodies(forms_of(THE_KEY)[form]):
                    outcome = judge.score(rollout, 5.0)
                    assert outcome.error is not None
                    assert leaked(outcome.error, THE_KEY) == [], (form, echo.body, outcome.error)
            judge.close()
        assert set(echo.headers) == {f"Bearer {THE_KEY}"}


class _ResponseError(OSError):
    """botocore's error, by its attribute."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.response = {
            "Error": {"Code": text, "Message": text},
            "ResponseMetadata": {"HTTPStatusCode": 403},
        }


class _StatusError(OSError):
    """An error of Azure or Google."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.status_code, self.error_code, self.message = 403, text, text


_StatusError.__module__ = "azure.core"

STORES: Mapping[str, Callable[[str], Exception]] = {
    "text": OSError,
    "S3 by botocore": _ResponseError,
    "obstore with a code": lambda text: OSError(
        f"Error performing GET https://host/x status code: 403 <Code>Denied</Code><Message>{text}</Message>"
    ),
    "obstore without an answer": lambda text: OSError(
        f'Error performing GET https://me:pw@host/x error: "{text}" kind: Connect'
    ),
    "Azure": _StatusError,
}


@pytest.mark.parametrize("store", sorted(STORES))
def test_no_error_of_a_store_shows_a_key(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", THE_KEY)
    for form, text in forms_of(THE_KEY).items():
        for before in (0, 380):
            said = explain(STORES[store](f"{'.' * before} {text}"), "s3://bucket/run", writing=False)
            assert leaked(said, THE_KEY) == [], (form, said)


def test_the_login_of_the_servers_is_sent_and_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model")
    with echoing() as echo:
        echo.status, echo.body = 401, b"wrong: Basic bWU6aHVudGVyMi94"
        monkeypatch.setenv(SERVER_LOGIN, "me:hunter2/x")
        with pytest.raises(ConfigError, match=r"/health answered 401: wrong: Basic \*\*\*; set VLLM_API_KEY"):
            ServerEngine(model, [echo.url], run_id="run")
        assert set(echo.headers) >= {"Basic bWU6aHVudGVyMi94"}
        monkeypatch.setenv("VLLM_API_KEY", "abc")
        with pytest.raises(ConfigError, match="are both set"):
            ServerEngine(model, [echo.url], run_id="run")
        monkeypatch.delenv("VLLM_API_KEY")
        monkeypatch.setenv(SERVER_LOGIN, "hunter2")
        with pytest.raises(ConfigError, match=r"has no colon; wanted user:password"):
            ServerEngine(model, [echo.url], run_id="run")
