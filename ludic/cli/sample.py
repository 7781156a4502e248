"""`ludic sample ROOT|MODEL --prompt TEXT`: ask a run's policy, or any model, a question.

Reads policies/ of a root, or a Hugging Face folder, id or URL; writes nothing to either.
"""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ludic.agents.requests import derive_seed
from ludic.cli.flags.sample import Settings
from ludic.engines.engine import Completion, GenerationRequest, SamplingParams
from ludic.errors import ConfigError, MissingRootError, StoreError
from ludic.launch.work import base_of_run
from ludic.models.first_model import is_hub_id, local_folder
from ludic.records import Message
from ludic.store import Root, fetch_policy, latest_policy
from ludic.store.filesystem import Storage
from ludic.viewer.output import number, print_json, printable, stdout_console

logger = logging.getLogger(__name__)

_DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion and its text."""

    text: str
    completion: Completion

    @property
    def mean_logprob(self) -> float:
        """Mean logprob of the completion's tokens, in nats."""
        return float(self.completion.logprobs.mean(dtype="float64"))


def main(settings: Settings) -> None:
    root = _open_root(settings.source)
    if root is None and settings.version is not None:
        raise ConfigError(f"{settings.source} is a model, not a run, so it has no version {settings.version}")
    with _policy_folder(root, settings) as (folder, version):
        with Console(stderr=True).status(f"sampling {settings.n} from {folder}"):
            answers = sample(folder, version or 0, settings, root)
    if settings.json:
        print_json({"source": settings.source, "policy_version": version, "answers": [_plain(a) for a in answers]})
    else:
        _print(stdout_console(), answers)


def sample(folder: str, version: int, settings: Settings, root: Root | None) -> list[Answer]:
    """Sample n answers from the model in a folder. Raises ModelError, ConfigError."""
    from ludic.engines.transformers_engine import TransformersEngine
    from ludic.models.chat import decode, load_tokenizer, render_prompt

    tokenizer = load_tokenizer(folder)
    with base_of_run(root) if root else nullcontext() as base:
        engine = TransformersEngine(folder, device=settings.device, version=version, base=base)
    messages = [Message(role="user", content=settings.prompt)]
    if settings.system is not None:
        messages.insert(0, Message(role="system", content=settings.system))
    prompt_tokens = render_prompt(tokenizer, messages)
    params = _params(settings, root, room=engine.max_length - len(prompt_tokens))
    seeds = [derive_seed(settings.seed, place) for place in range(settings.n)]
    completions = engine.generate(
        [GenerationRequest(prompt_tokens=prompt_tokens, params=params, seed=seed) for seed in seeds]
    )
    return [Answer(text=decode(tokenizer, c.tokens), completion=c) for c in completions]


def _params(settings: Settings, root: Root | None, room: int) -> SamplingParams:
    """Return sampling parameters from the flags, else the run, else the defaults. room: tokens left in the model."""
    run = {name: getattr(root.run, name) for name in ("temperature", "top_p", "top_k", "max_tokens")} if root else {}
    asked = {name: getattr(settings, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
    values: dict[str, Any] = run | {name: value for name, value in asked.items() if value is not None}
    if settings.max_tokens is None:
        values["max_tokens"] = max(1, min(values.get("max_tokens", _DEFAULT_MAX_TOKENS), room))
    return SamplingParams(**values)


def _open_root(source: str) -> Root | None:
    """Open the run; returns None if the source may be a model. Raises MissingRootError if it can be neither."""
    try:
        return Root.open(source)
    except (MissingRootError, StoreError) as error:
        if Storage.connect(source).exists("config.json"):
            return None
        if is_hub_id(source):
            logger.info("there is no folder %s here; asking Hugging Face for a model of that name", source)
            return None
        if isinstance(error, StoreError):
            raise
        raise MissingRootError(f"{source} holds neither a run (run.json) nor a model (config.json)") from None


@contextmanager
def _policy_folder(root: Root | None, settings: Settings) -> Iterator[tuple[str, int | None]]:
    """Give a local folder of weights, and their version, which is None for a model."""
    if root is None:
        with local_folder(settings.source) as model:
            yield str(model), None
        return
    version = _version(root, settings.version)
    with tempfile.TemporaryDirectory(prefix="ludic-policy-") as cache:
        try:
            folder = fetch_policy(root, version, Path(cache))
        except FileNotFoundError:
            raise ConfigError(
                f"{root.url} holds no weights of version {version}; it has {_stored_versions(root)}"
            ) from None
        yield folder, version


def _version(root: Root, asked: int | None) -> int:
    if asked is not None:
        return asked
    latest = latest_policy(root)
    if latest is None:
        raise ConfigError(
            f"{root.url} has published no policy yet; `ludic sample {root.run.model}` asks its first model"
        )
    return latest.version


def _stored_versions(root: Root) -> str:
    names = [name.split("/")[1] for name in root.list("policies") if name.endswith("/config.json")]
    versions = sorted(int(name.removeprefix("version=")) for name in names)
    return f"{len(versions)} from {versions[0]} to {versions[-1]}" if versions else "none"


def _plain(answer: Answer) -> dict[str, Any]:
    completion = answer.completion
    return {
        "text": answer.text,
        "finish_reason": completion.finish_reason,
        "mean_logprob": answer.mean_logprob,
        "tokens": completion.tokens.tolist(),
        "logprobs": completion.logprobs.tolist(),
    }


def _print(console: Console, answers: list[Answer]) -> None:
    for place, answer in enumerate(answers):
        completion = answer.completion
        facts = f"{place + 1}: {len(completion.tokens)} tokens, finish_reason {completion.finish_reason}"
        console.print(Text(f"{facts}, mean logprob {number(answer.mean_logprob, 4)}", style="dim"))
        console.print(Text(printable(answer.text)), soft_wrap=True)
