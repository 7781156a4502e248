"""Reward models as scorers: `model:PATH_OR_ID` runs in this process, `pooling:URL` is asked of a vLLM server.

Each scores a conversation, of the model's own chat template: for questions the prompt and the answer (ModelScorer,
ServerScorer), for `ludic score` the messages of a stored rollout (RolloutScorer). The score is the logit of the head's
only label, of the label in the settings, or the difference of two. Raises ConfigError and ModelError for what can't
heal, ScorerError for one conversation.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import exp
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal
from weakref import WeakKeyDictionary

import msgspec

from ludic.adapters.judge import Judge, check_url
from ludic.base import LUDIC, name_and_version
from ludic.environments import Example, Score
from ludic.errors import ConfigError, JudgeError, LudicError, ScorerError
from ludic.eval import Outcome, ScoreOptions, failed, to_outcome
from ludic.models import Dtype, Loading, shared_model
from ludic.records import Message, Rollout
from ludic.root.weights import identify_at, local_folder
from ludic.settings import POOLING, REWARD_MODEL, Range, RequestLimit, SecondsOfADay, SideLoop, Tokens, convert
from ludic.settings.table import check

Activation = Literal["none", "sigmoid"]
TruncationSide = Literal["left", "right"]

SYNTHETIC_CHAT = (Message(role="user", content="made up"), Message(role="assistant", content="made up"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Settings of a reward model `model:PATH_OR_ID`."""

    name: str | None = None
    """Name of the component of the reward, or of the scorer; None is the last part of the path."""
    label: int | str | None = None
    """Label whose logit is the score, by index or name; None is the only one."""
    minus_label: int | str | None = None
    """Label whose logit is subtracted."""
    activation: Activation = "none"
    """Function of the score: none, or sigmoid, which maps it to 0 to 1."""
    max_length: Tokens | None = None
    """Maximum tokens of a conversation; None is the limit of the model."""
    truncate: TruncationSide | None = None
    """Cut longer conversations at the left or at the right; None refuses them."""
    device: str | None = None
    """Device of the model: cpu or cuda:N, of the GPUs that the process sees; None is its last GPU, or the CPU."""
    dtype: Dtype = "auto"
    """Type of the weights and of the computation; auto is that of the files."""
    revision: str | None = None
    """Commit, tag or branch of a model on the Hub."""
    max_batch_size: Annotated[int, Range(1, 4096)] = 32
    """Maximum conversations in a forward pass."""
    max_batch_tokens: Tokens = 16_384
    """Maximum tokens in a forward pass, with padding; a longer conversation is a batch of its own."""
    max_wait_ms: Annotated[float, Range(0, 60_000)] = 10.0
    """Milliseconds that a conversation waits for others to share its forward pass."""

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        check(self)
        _check_labels(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of a reward model on a vLLM server, `pooling:URL`."""

    name: str | None = None
    """Name of the component of the reward, or of the scorer; None is pooling."""
    model: str | None = None
    """Model, by its name on the server; None is the one that it serves."""
    label: int | None = None
    """Index of the label whose logit is the score; None is the only one."""
    minus_label: int | None = None
    """Index of the label whose logit is subtracted."""
    activation: Activation = "none"
    """Function of the score: none, or sigmoid, which maps it to 0 to 1."""
    max_length: Tokens | None = None
    """Maximum tokens of a conversation; None is the limit of the server."""
    truncate: TruncationSide | None = None
    """Cut longer conversations at the left or at the right; None refuses them."""
    tries: Annotated[int, Range(1, 100)] = 5
    """Maximum requests for one score if the server can't be reached, is overloaded or fails."""
    timeout_s: SecondsOfADay = 60.0
    """Maximum seconds of one score, all tries together, without the wait for its turn."""
    key_env: str | None = None
    """Environment variable that holds the server's API key; the key is never stored. None sends no key."""
    max_in_flight: Annotated[int, Range(1, 4096)] = 64
    """Maximum requests at a time of one process to this server."""

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        check(self)
        _check_labels(self)


def _check_labels(settings: ModelSettings | ServerSettings) -> None:
    if settings.minus_label is not None and settings.label is None:
        raise ConfigError("minus_label is given without label; the score is the logit of label minus that of the other")


# --- A model in this process -----------------------------------------------------------------------------------------


class ModelScorer:
    """A scorer of questions: the reward model scores the prompt with the answer."""

    loads_model = True

    def __init__(self, source: str, settings: Mapping[str, Any]) -> None:
        """source: folder, Hugging Face id or URL. Reads no weights. Raises ConfigError, ModelError."""
        where = f"reward model {REWARD_MODEL}{source}: "
        self.settings = convert(ModelSettings, settings, where=where)
        self.name = self.settings.name or PurePosixPath(source).name or source
        self._source = source
        self._model = shared_model(_loading(source, self.settings))
        labels = self._model.labels
        self._labels = _Labels.of(
            where,
            self.settings.activation,
            *(_index_of(label, labels, where) for label in (self.settings.label, self.settings.minus_label)),
            num_labels=len(labels),
            names=labels,
        )
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, RequestLimit] = WeakKeyDictionary()

    async def score(self, example: Example, answer: str) -> Score:
        """Return the score of an answer. Raises LudicError."""
        return Score(reward=await self.value(_conversation(example, answer)))

    async def value(self, messages: Sequence[Message]) -> float:
        """Return the score of a conversation. Raises LudicError."""
        tokens = self._model.tokens_of(messages)
        limit, side = self.settings.max_length or self._model.max_length, self.settings.truncate
        if len(tokens) > limit:
            if side is None:
                raise ScorerError(
                    f"the conversation has {len(tokens):,} tokens, and the reward model {self._source} takes "
                    f"{limit:,}; set truncate to left or right, or lower the run's max_tokens"
                )
            tokens = tokens[-limit:] if side == "left" else tokens[:limit]
        # The load, and the wait for a place in one of the next batches, are no part of the call's time.
        async with self._request_limit().turn(self._is_loaded):
            logits = await asyncio.wrap_future(self._model.logits(tokens))
        return self._labels.value(logits.tolist())

    async def prepare(self) -> str:
        """Load the model, and return its digest. Raises LudicError."""
        await self._is_loaded()
        return digest_of(self._source, self.settings.revision)[0]

    async def _is_loaded(self) -> None:
        await asyncio.wrap_future(self._model.load())

    def _request_limit(self) -> RequestLimit:
        return self._turns.setdefault(asyncio.get_running_loop(), RequestLimit(4 * self.settings.max_batch_size))


def _loading(source: str, settings: ModelSettings) -> Loading:
    return Loading(
        source=source,
        revision=settings.revision,
        device=settings.device,
        dtype=settings.dtype,
        max_batch_size=settings.max_batch_size,
        max_batch_tokens=settings.max_batch_tokens,
        max_wait_ms=settings.max_wait_ms,
    )


def _conversation(example: Example, answer: str) -> list[Message]:
    return [*example.messages, Message(role="assistant", content=answer)]


def digest_of(source: str, revision: str | None) -> tuple[str, dict[str, str]]:
    """Return the SHA-256 of a model, and that of each of its files by name. Raises ModelError."""
    with local_folder(source, revision=revision) as folder:
        identity = identify_at(folder, source)
    files = {**identity.config, **identity.tokenizer, **identity.weights}
    return sha256(json.dumps(files, sort_keys=True).encode()).hexdigest(), files


def source_of(name: str, options: Mapping[str, Any]) -> tuple[str | None, str | None, dict[str, str]]:
    """Return what tells a reward model from another, for the records of a run's code; see Kind.source.

    Of a model in the process its digest and those of its files, with transformers' version. Of a server nothing is
    known before it is asked.
    """
    if not name.startswith(REWARD_MODEL):
        return None, name_and_version(LUDIC), {}
    digest, files = digest_of(name.removeprefix(REWARD_MODEL), options.get("revision"))
    return digest, name_and_version("transformers"), files


# --- A model behind a server -----------------------------------------------------------------------------------------


class _Class(msgspec.Struct):
    probs: list[float]
    """The logits, since no activation is asked for."""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0


class _Classified(msgspec.Struct):
    data: list[_Class]
    model: str = ""
    usage: _Usage = msgspec.field(default_factory=_Usage)


class ServerScorer:
    """A scorer of questions: a vLLM server with a reward model scores the prompt with the answer, by POST /classify."""

    loads_model = False

    def __init__(self, url: str, settings: Mapping[str, Any]) -> None:
        """url: base URL without /v1, such as http://localhost:8000. No request is sent. Raises ConfigError."""
        self._where = f"reward model {POOLING}{check_url(url, 'the URL of a pooling server')}: "
        self.settings = convert(ServerSettings, settings, where=self._where)
        self.name = self.settings.name or POOLING.rstrip(":")
        self._judge = Judge(
            url,
            self.settings.model,
            options={},
            tries=self.settings.tries,
            timeout_s=self.settings.timeout_s,
            key_env=self.settings.key_env,
            max_in_flight=self.settings.max_in_flight,
        )

    async def score(self, example: Example, answer: str) -> Score:
        """Return the score of an answer. Raises LudicError."""
        return Score(reward=await self.value(_conversation(example, answer)))

    async def value(self, messages: Sequence[Message]) -> float:
        """Return the score of a conversation. Raises LudicError."""
        logits, _ = await self._logits(messages)
        return self._score_of(logits)

    async def prepare(self) -> str:
        """Find out what can't heal, by a made-up conversation; return the model's name. Raises LudicError."""
        logits, name = await self._logits(SYNTHETIC_CHAT)
        self._score_of(logits)
        return name

    def _score_of(self, logits: Sequence[float]) -> float:
        settings = self.settings
        labels = _Labels.of(
            self._where, settings.activation, settings.label, settings.minus_label, num_labels=len(logits), names={}
        )
        return labels.value(logits)

    async def _logits(self, messages: Sequence[Message]) -> tuple[list[float], str]:
        """Return the logits of a conversation and the name of the model. Raises ScorerError."""
        limit, side = self.settings.max_length, self.settings.truncate
        body: dict[str, Any] = {"messages": [_as_json(each) for each in messages], "use_activation": False}
        if side is not None:
            body |= {"truncate_prompt_tokens": limit or -1, "truncation_side": side}
        try:
            found = msgspec.convert(await self._judge.post("/classify", body), _Classified)
        except JudgeError as error:
            raise ScorerError(f"{self._where}{error}") from error
        except msgspec.ValidationError as error:
            raise ScorerError(f"{self._where}the answer is no classification: {error}") from error
        if limit is not None and side is None and found.usage.prompt_tokens > limit:
            raise ScorerError(
                f"{self._where}the conversation has {found.usage.prompt_tokens:,} tokens, and max_length is {limit:,}; "
                "set truncate to left or right, or lower the run's max_tokens"
            )
        if len(found.data) != 1 or not found.data[0].probs:
            raise ScorerError(f"{self._where}the answer has no scores, wanted those of one conversation")
        return found.data[0].probs, found.model


def _as_json(message: Message) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    named = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": message.content, **named, **({"tool_calls": calls} if calls else {})}


# --- Labels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Labels:
    """The logits of a head that make the score."""

    label: int
    minus_label: int | None
    activation: Activation

    @classmethod
    def of(
        cls,
        where: str,
        activation: Activation,
        label: int | None,
        minus_label: int | None,
        *,
        num_labels: int,
        names: Mapping[int, str],
    ) -> "_Labels":
        """Check labels against those of a model. Raises ConfigError."""
        listed = ", ".join(f"{index} {names.get(index, '')}".rstrip() for index in range(num_labels))
        if label is None and num_labels != 1:
            raise ConfigError(
                f"{where}the model has {num_labels} labels ({listed}), and the score is the logit of one; set label, "
                "or label and minus_label for the difference of two"
            )
        for each in (label, minus_label):
            if each is not None and not 0 <= each < num_labels:
                raise ConfigError(f"{where}the model has no label {each}; it has {listed}")
        return cls(label or 0, minus_label, activation)

    def value(self, logits: Sequence[float]) -> float:
        score = logits[self.label] - (0.0 if self.minus_label is None else logits[self.minus_label])
        return _sigmoid(score) if self.activation == "sigmoid" else score


def _sigmoid(score: float) -> float:
    return 1 / (1 + exp(-score)) if score >= 0 else exp(score) / (1 + exp(score))


def _index_of(label: int | str | None, names: Mapping[int, str], where: str) -> int | None:
    """Return the index of a label by name or index. Raises ConfigError for an unknown name."""
    if not isinstance(label, str):
        return label
    found = next((index for index, name in names.items() if name == label), None)
    if found is None:
        raise ConfigError(f"{where}the model has no label {label!r}; it has {', '.join(names.values())}")
    return found


# --- Scorers of stored rollouts --------------------------------------------------------------------------------------


class RolloutScorer:
    """A reward model as a Scorer of `ludic score`: it scores the messages of a rollout."""

    prompt: str | None = None

    def __init__(self, scorer: ModelScorer | ServerScorer, setting: str) -> None:
        """Load the model, or ask the server once. setting: names the scorer. Raises ConfigError, ModelError."""
        self._scorer, self.name = scorer, scorer.name
        self._loop = SideLoop()
        try:
            identity = self._loop.run(self._scorer.prepare())
        except LudicError as error:
            self._loop.close()
            raise ConfigError(str(error)) from error
        self.model: str | None = setting.removeprefix(REWARD_MODEL) if scorer.loads_model else identity
        settings = {name: value for name, value in asdict(scorer.settings).items() if name in _SCORING}
        about = [identity, settings]
        self.version = sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def score(self, rollout: Rollout, timeout_s: float) -> Outcome:
        """Score a rollout; one without messages fails."""
        if not rollout.messages:
            return failed("the rollout has no messages, which the reward model needs")
        try:
            return to_outcome(self._loop.run(self._scorer.value(rollout.messages), timeout_s))
        except (LudicError, TimeoutError) as error:
            return failed(str(error))

    def close(self) -> None:
        """End the event loop."""
        self._loop.close()


_SCORING = ("label", "minus_label", "activation", "max_length", "truncate", "dtype", "model")
"""Settings on which a score depends."""


def of_model(source: str, options: ScoreOptions) -> RolloutScorer:
    """Return the scorer model:SOURCE of stored rollouts. Raises ConfigError, ModelError."""
    return RolloutScorer(ModelScorer(source, options.scorer_options), f"{REWARD_MODEL}{source}")


def of_server(url: str, options: ScoreOptions) -> RolloutScorer:
    """Return the scorer pooling:URL of stored rollouts. Raises ConfigError."""
    return RolloutScorer(ServerScorer(url, options.scorer_options), f"{POOLING}{url}")
