"""Call the HTTP endpoints of one vLLM server, to sample tokens and to replace its weights.

Requests follow vLLM's documentation, and every answer is checked. Every call may be repeated. Raises UnreachableError
if no answer comes, BadAnswerError if an answer can't be used, RefusedError if the server refuses the request itself,
and ConfigError for a server that was started without the flags that ludic needs.
"""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2
import msgspec
import numpy as np
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_fixed

from ludic.base import MOST_BYTES, SERVER_LOGIN, AnswerTooLongError, HttpAnswer, ask, has_secret, mask, public_url
from ludic.engines.engine import GenerationRequest
from ludic.errors import ConfigError, EngineError, NoServerError, one_line

FLAGS = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --generation-config vllm --logprobs-mode processed_logprobs "
    "--enable-scale-out --worker-extension-cls ludic.engines.vllm_worker.WorkerExtension"
)
"""How to start a server, for errors."""
SERVE_NAME = "ludic-serve"
"""Model name of servers that `ludic serve` started; these load weights themselves."""

_CALL_S = 30.0
_CONNECT_S = 10.0
_LOAD_S = 1800.0
_SETUP_S = 120.0
"""Seconds of the first call to /server_info, for which vLLM inspects its machine."""
_NO_LOGPROB = -9999.0
"""Value that vLLM sends for NaN and for minus infinity."""
_MOST_BYTES_OF_LOGPROB = 1 << 10
"""Largest JSON of one token with its logprob; vLLM adds the token's text, and its bytes as numbers."""
_MOST_BYTES_OF_EXPERTS = 1 << 14
"""Largest base64 of the experts of one token: 96 layers, 32 experts in each, of 4 bytes."""
_OWN_RELOAD = "ludic_reload_weights"
"""Method of ludic.engines.vllm_worker; a server has it if it was started with this as worker extension."""
_MOST_CHARACTERS = 300
"""Maximum characters of a server's own message in an error."""
_COMPLETIONS_ONLY = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Sent to /v1/completions, which takes what is not given from the model's generation_config.json."""


class UnreachableError(NoServerError):
    """A server did not answer."""


class _LostError(UnreachableError):
    """A connection ended before the answer, for example because it was idle; try again."""


class BadAnswerError(EngineError):
    """A server's answer can't be used: it is an error, or does not match the request."""


class RefusedError(BadAnswerError):
    """A server says that the request is wrong."""


class MissingEndpointError(BadAnswerError):
    """A server does not have an endpoint."""


class _Said(msgspec.Struct):
    """A server's message; its texts may contain the key, and appear in errors, logs and the names of engines."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if isinstance(value := getattr(self, name), str):
                setattr(self, name, mask(value))


class LabelSpan(_Said):
    """Tokens that were sampled under weights of one label."""

    version: str
    start: int
    end: int


class ServerCompletion(msgspec.Struct):
    """Tokens that a server sampled, checked: as many logprobs as tokens, and a known end."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    spans: list[LabelSpan] | None
    """Labels of the weights; None if the server does not give them."""
    candidates: list[tuple[list[int], list[float]]] | None = None
    """Ids and logprobs of the most likely tokens at each token, if the request asks for them."""
    experts: np.ndarray | None = None
    """Experts of each layer for the tokens that the model read, if the request asks for them; of any shape."""


class Model(_Said):
    """A model in /v1/models."""

    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[Model]


class _Version(_Said):
    version: str


class _WeightInfo(_Said):
    weight_version: str


class _Device(msgspec.Struct, frozen=True):
    """Device as vLLM 0.32 reports it: without device_type, though its source has it; null on some hardware."""

    device: str | None = None
    device_type: str | None = None


class _ModelConfig(msgspec.Struct, frozen=True):
    dtype: str = ""


class _SchedulerConfig(msgspec.Struct, frozen=True):
    enable_chunked_prefill: bool = False


class _VllmConfig(msgspec.Struct):
    device_config: _Device = _Device()
    model_config: _ModelConfig = _ModelConfig()
    scheduler_config: _SchedulerConfig = _SchedulerConfig()


class _ServerInfo(msgspec.Struct):
    vllm_config: _VllmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A server's device and precision, as far as it reports them."""

    device: str = ""
    """Such as cpu; "" if not reported."""
    dtype: str = ""
    """Such as float32; "" if not reported."""
    cuts_prompts: bool = False
    """True if the server may compute a prompt in parts (chunked prefill)."""


class _IsPaused(msgspec.Struct):
    is_paused: bool


class _Candidate(msgspec.Struct):
    token_id: int
    logprob: float


class _LogProb(msgspec.Struct):
    logprob: float
    top_logprobs: list[_Candidate]


class _LogProbs(msgspec.Struct):
    content: list[_LogProb]


class _Choice(_Said):
    token_ids: list[int]
    logprobs: _LogProbs
    finish_reason: str | None
    weight_versions: list[LabelSpan] | None = None
    routed_experts: bytes | None = None
    """A file of NumPy, which msgspec decodes from base64."""


class _Generated(msgspec.Struct):
    choices: list[_Choice]


class _TextLogProbs(msgspec.Struct):
    token_logprobs: list[float]


class _TextChoice(_Said):
    logprobs: _TextLogProbs
    finish_reason: str | None
    token_ids: list[int]


class _Completed(msgspec.Struct):
    choices: list[_TextChoice]


_T = TypeVar("_T")


class Server:
    """A client of one server. Belongs to the event loop of its HTTP client."""

    def __init__(self, url: str, client: httpx2.AsyncClient, timeout_s: float) -> None:
        """url: such as http://node1:8000, from `check_url`. timeout_s: of a request for a completion."""
        self._url, self._client, self._timeout_s = url, client, timeout_s
        self.name = public_url(url)
        """The URL without credentials, for logs."""
        self._has_own_reload = True
        """False once the server has reported that it lacks ludic's methods."""

    async def check_health(self) -> None:
        """Raise UnreachableError unless the server and its engine run. Does not wait for the engine."""
        try:
            await self._call("GET", "/health", timeout_s=10.0)
        except BadAnswerError as error:
            raise UnreachableError(str(error)) from error

    async def model(self) -> Model:
        """Return the served model; adapters come after it."""
        models = _parse(await self._call("GET", "/v1/models"), _Models, self.name)
        if not models.data:
            raise BadAnswerError(f"{self.name} serves no model")
        return models.data[0]

    async def version(self) -> str:
        """Return the version of vLLM, such as 0.32.0; "unknown" if the server does not report it."""
        try:
            return _parse(await self._call("GET", "/version"), _Version, self.name).version
        except MissingEndpointError:
            return "unknown"

    async def label(self) -> str:
        """Return the label of the weights, see ludic.engines.server_loading."""
        try:
            content = await self._call("GET", "/weight_info")
        except MissingEndpointError as error:
            raise ConfigError(
                f"{self.name} is not a vLLM server whose weights can be changed (it has no /weight_info); start it "
                f"with {FLAGS}, or run `ludic serve ROOT` on its machine"
            ) from error
        return _parse(content, _WeightInfo, self.name).weight_version

    async def set_label(self, label: str) -> None:
        await self._call("POST", "/update_weight_version", json={"new_version": label})

    async def is_paused(self) -> bool:
        return _parse(await self._call("GET", "/is_paused"), _IsPaused, self.name).is_paused

    async def pause(self) -> None:
        """Let the requests in the server wait, between two tokens, and keep their keys and values."""
        await self._call("POST", "/pause", params={"mode": "keep", "clear_cache": "false"})

    async def resume(self) -> None:
        await self._call("POST", "/resume")

    async def setup(self) -> Setup:
        """Return the server's device and precision."""
        try:
            content = await self._call("GET", "/server_info", params={"config_format": "json"}, timeout_s=_SETUP_S)
            found = _parse(content, _ServerInfo, self.name).vllm_config
        except BadAnswerError:  # a development endpoint, which may change
            return Setup()
        device = found.device_config.device_type or found.device_config.device or ""
        return Setup(
            device=device.partition(":")[0],
            dtype=found.model_config.dtype.removeprefix("torch."),
            cuts_prompts=found.scheduler_config.enable_chunked_prefill,
        )

    @property
    def has_extension(self) -> bool:
        """True if the server was started with ludic's worker extension; known after `reload`."""
        return self._has_own_reload

    async def reload(self, folder: str) -> None:
        """Replace the weights by those of a folder that the server sees.

        Prefixes stay in its cache unused: requests under other weights have another salt. Clearing the cache would make
        vLLM compute the keys and values of the waiting requests again.
        """
        if self._has_own_reload:
            try:
                await self._run(_OWN_RELOAD, folder)
            except BadAnswerError as error:
                if "is not implemented" not in str(error) and "has no attribute" not in str(error):
                    raise
                self._has_own_reload = False
        if not self._has_own_reload:
            await self._run("reload_weights", folder)

    async def _run(self, method: str, folder: str) -> None:
        """Call a method of vLLM's workers."""
        body = {"method": method, "kwargs": {"weights_path": folder}}
        await self._call("POST", "/collective_rpc", json=body, timeout_s=_LOAD_S)

    async def generate(self, request: GenerationRequest, params: Mapping[str, Any], salt: str) -> ServerCompletion:
        """Sample by /inference/v1/generate. params: of `to_vllm_params`. salt: prompts share prefixes under equal ones.

        Raises MissingEndpointError if the server does not have this endpoint.
        """
        body = {"token_ids": request.prompt_tokens.tolist(), "sampling_params": params, "cache_salt": salt}
        most_bytes = _most_bytes(request, params)
        content = await self._call(
            "POST", "/inference/v1/generate", json=body, timeout_s=self._timeout_s, most_bytes=most_bytes
        )
        choice = _only(_parse(content, _Generated, self.name).choices, self.name)
        logprobs = [entry.logprob for entry in choice.logprobs.content]
        answer = self._checked(request, choice.token_ids, logprobs, choice.finish_reason, choice.weight_versions)
        if request.params.wants_kept_tokens:
            answer.candidates = [_candidates(entry.top_logprobs) for entry in choice.logprobs.content]
        if request.params.return_experts:
            answer.experts = self._experts(choice.routed_experts)
        return answer

    def _experts(self, data: bytes | None) -> np.ndarray:
        if data is None:
            raise ConfigError(
                f"{self.name} returns no experts; start it with --enable-return-routed-experts, or a run "
                "without --keep-experts"
            )
        try:
            return _to_array(data)
        except ValueError as error:
            raise BadAnswerError(
                f"{self.name} answered with experts that are not a NumPy array: {one_line(error)}"
            ) from error

    async def complete(
        self, request: GenerationRequest, params: Mapping[str, Any], salt: str, model: str
    ) -> ServerCompletion:
        """Sample by /v1/completions, which tells no versions of weights. Arguments: see `generate`.

        Raises ConfigError for a request that wants the kept tokens or experts.
        """
        if request.params.return_experts:
            raise ConfigError(
                f"{self.name} does not tell which experts it chose; start it with --enable-scale-out and "
                "--enable-return-routed-experts, or a run without --keep-experts"
            )
        if request.params.wants_kept_tokens:
            raise ConfigError(
                f"{self.name} does not tell which tokens top_k and top_p kept; start it with --enable-scale-out, or a "
                "run with --keep-sampling-mask False, which biases importance ratios"
            )
        own = {name: value for name, value in params.items() if name != "detokenize"}
        body = {
            "model": model,
            "prompt": request.prompt_tokens.tolist(),
            "return_token_ids": True,
            "cache_salt": salt,
            **_COMPLETIONS_ONLY,
            **own,
        }
        content = await self._call(
            "POST",
            "/v1/completions",
            json=body,
            timeout_s=self._timeout_s,
            most_bytes=_most_bytes(request, params),
        )
        choice = _only(_parse(content, _Completed, self.name).choices, self.name)
        return self._checked(request, choice.token_ids, choice.logprobs.token_logprobs, choice.finish_reason, None)

    def _checked(
        self,
        request: GenerationRequest,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        finish_reason: str | None,
        spans: Sequence[LabelSpan] | None,
    ) -> ServerCompletion:
        if finish_reason not in ("stop", "length"):  # abort: the server is shutting down, or its requests were aborted
            raise BadAnswerError(f"{self.name} ended a request with {finish_reason}; wanted stop or length")
        if not 1 <= len(tokens) <= request.params.max_tokens or len(logprobs) != len(tokens):
            raise BadAnswerError(
                f"{self.name} answered with {len(tokens)} tokens and {len(logprobs)} logprobs; wanted as many logprobs "
                f"as tokens, from 1 to {request.params.max_tokens}"
            )
        if spans is not None:
            ends = [0, *(span.end for span in spans)]
            if [span.start for span in spans] != ends[:-1] or ends[-1] != len(tokens) or ends != sorted(set(ends)):
                raise BadAnswerError(f"{self.name} answered with spans of weights that do not cover its tokens")
        found = [math.nan if logprob <= _NO_LOGPROB else logprob for logprob in logprobs]
        return ServerCompletion(list(tokens), found, finish_reason, None if spans is None else list(spans))

    @retry(retry=retry_if_exception_type(_LostError), stop=stop_after_attempt(3), wait=wait_fixed(0.1), reraise=True)
    async def _call(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float = _CALL_S,
        most_bytes: int = MOST_BYTES,
    ) -> bytes:
        limits: dict[str, Any] = {"timeout_s": timeout_s, "connect_s": _CONNECT_S, "most_bytes": most_bytes}
        try:
            answer = await ask(self._client, method, self._url + path, json=json, params=params, **limits)
        except AnswerTooLongError as error:
            raise BadAnswerError(f"{self.name}{path}: {error}") from error
        except httpx2.TransportError as error:
            is_lost = isinstance(error, httpx2.ReadError | httpx2.WriteError | httpx2.RemoteProtocolError)
            why = f"{type(error).__name__} {one_line(error)}".strip()
            raise (_LostError if is_lost else UnreachableError)(f"{self.name} does not answer ({why})") from error
        if answer.is_success:
            return answer.data
        raise self._error(path, answer)

    def _error(self, path: str, answer: HttpAnswer) -> Exception:
        text = f"{self.name}{path} answered {answer.status}: {_message(answer)}"
        if answer.status in (401, 403):
            return ConfigError(
                f"{text}; set VLLM_API_KEY to the key that the server was started with, or {SERVER_LOGIN} "
                "to user:password of a proxy before it"
            )
        kind = {404: MissingEndpointError, 405: MissingEndpointError, 400: RefusedError, 422: RefusedError}
        return kind.get(answer.status, BadAnswerError)(text)


def check_url(url: str) -> str:
    """Return a server's URL without a slash or /v1 at its end. Raises ConfigError if it is not a URL, or has a
    password."""
    try:
        parsed = httpx2.URL(url)
        is_usable = (
            parsed.scheme in ("http", "https")
            and bool(parsed.host)
            and not (parsed.query or parsed.fragment or has_secret(url))
        )
    except httpx2.InvalidURL:
        is_usable = False
    if not is_usable:
        raise ConfigError(
            f"server_url is {public_url(url)}, which is not the URL of a server; wanted one such as http://node1:8000"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _parse(content: bytes, type_: type[_T], name: str) -> _T:
    try:
        return msgspec.json.decode(content, type=type_)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadAnswerError(f"{name} answered what no vLLM does ({one_line(error)}); is it another server?") from error


def _candidates(found: Sequence[_Candidate]) -> tuple[list[int], list[float]]:
    logprobs = [-math.inf if entry.logprob <= _NO_LOGPROB else entry.logprob for entry in found]
    return [entry.token_id for entry in found], logprobs


def _only(choices: Sequence[_T], name: str) -> _T:
    if len(choices) != 1:
        raise BadAnswerError(f"{name} answered with {len(choices)} completions, wanted 1")
    return choices[0]


def _message(answer: HttpAnswer) -> str:
    return " ".join(mask(answer.text).split())[:_MOST_CHARACTERS] or "(no text)"


def _most_bytes(request: GenerationRequest, params: Mapping[str, Any]) -> int:
    """Return the size of the largest answer to a request. params: of `to_vllm_params`."""
    num_sampled, num_logprobs = request.params.max_tokens, 1 + int(params.get("logprobs") or 0)
    num_read = len(request.prompt_tokens) + num_sampled if request.params.return_experts else 0
    return MOST_BYTES + num_sampled * num_logprobs * _MOST_BYTES_OF_LOGPROB + num_read * _MOST_BYTES_OF_EXPERTS


def _to_array(data: bytes) -> np.ndarray:
    """Return the integers in a .npy file. Reads its header first: it may promise an array of any size.

    Raises ValueError.
    """
    file = io.BytesIO(data)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(np.lib.format.read_magic(file))
    if read_header is None:
        raise ValueError("its version of the format is neither 1.0 nor 2.0")
    try:
        shape, is_fortran, dtype = read_header(file)
    # The header is a Python expression, whose parser may raise other errors.
    except Exception as error:
        raise ValueError(f"its header can't be read ({one_line(error)})") from error
    wanted, found = math.prod(shape) * dtype.itemsize, len(data) - file.tell()
    if dtype.kind not in "iu" or min(shape, default=0) < 0 or wanted != found:
        raise ValueError(f"it says {dtype} of shape {shape}, wanted integers of {found} bytes, as many as it has")
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape, order="F" if is_fortran else "C")
