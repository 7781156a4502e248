"""Sample answers to one prompt from a run's policy or from any model, without storing them.

Reads policies/ of a root, or a Hugging Face folder, id or URL. Raises ConfigError if there are no such weights or a
setting does not fit the model, ModelError if the model can't be loaded.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np

from ludic.agents import derive_seed
from ludic.base import Part, Result, Sentence, number, temporary_folder
from ludic.engines import GenerationRequest, SamplingParams, generate_all
from ludic.errors import ConfigError
from ludic.records import FinishReason, Message
from ludic.rollouts.config import Question
from ludic.root import Root
from ludic.root.weights import base_of_run, fetch_policy, latest_policy, local_folder, stored_versions
from ludic.run import SAMPLING, is_recorded_run, run_of
from ludic.settings import overridden


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledAnswer:
    """One completion and its text."""

    text: str
    tokens: np.ndarray = field(repr=False)
    """(length,) int32, including the stop token."""
    logprobs: np.ndarray = field(repr=False)
    """(length,) float32, nats, under the distribution sampled from."""
    finish_reason: FinishReason
    policy_version: int | None
    """Version of the run's weights; None for a model outside a run."""

    @property
    def mean_logprob(self) -> float:
        """Mean logprob of the tokens, in nats."""
        return float(self.logprobs.mean(dtype="float64"))


class Answers(Result, Sequence[SampledAnswer]):
    """Answers to one prompt."""

    def __init__(self, source: str, answers: Sequence[SampledAnswer]) -> None:
        """source: root or model that answered."""
        self.source = source
        self._answers = answers

    @overload
    def __getitem__(self, index: int) -> SampledAnswer: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[SampledAnswer]: ...

    def __getitem__(self, index: int | slice) -> SampledAnswer | Sequence[SampledAnswer]:
        return self._answers[index]

    def __len__(self) -> int:
        return len(self._answers)

    def to_dict(self) -> dict[str, Any]:
        answers = [
            {
                "text": answer.text,
                "finish_reason": answer.finish_reason,
                "mean_logprob": answer.mean_logprob,
                "tokens": answer.tokens.tolist(),
                "logprobs": answer.logprobs.tolist(),
            }
            for answer in self._answers
        ]
        return {"source": self.source, "policy_version": self._answers[0].policy_version, "answers": answers}

    def parts(self) -> Iterator[Part]:
        """Each answer, after a line of its figures."""
        for number_, answer in enumerate(self._answers, 1):
            facts = f"{number_}: {len(answer.tokens)} tokens, finish_reason {answer.finish_reason}"
            yield Sentence(f"{facts}, mean logprob {number(answer.mean_logprob, 4)}", style="dim")
            yield answer.text


def sample_run(root: Root, question: Question, version: int | None = None) -> Answers:
    """Sample answers from a published version of a run's policy; None means the latest."""
    version = _latest_version(root) if version is None else version
    with temporary_folder("policy") as cached:
        try:
            folder = fetch_policy(root, version, cached)
        except FileNotFoundError:
            raise ConfigError(
                f"{root.url} holds no weights of version {version}; it has {_stored_versions(root)}"
            ) from None
        return Answers(root.url, _sample(folder, question, root, version))


def sample_model(model: str, question: Question) -> Answers:
    """Sample answers from a model: a folder, Hugging Face id or URL."""
    with local_folder(model) as folder:
        return Answers(model, _sample(str(folder), question, None, None))


def _sample(folder: str, question: Question, root: Root | None, version: int | None) -> list[SampledAnswer]:
    from ludic.engines import TransformersEngine  # loads torch
    from ludic.models import decode, load_tokenizer, render_prompt

    tokenizer = load_tokenizer(folder)
    with ExitStack() as stack:
        run = None if root is None else run_of(root)
        engine = TransformersEngine(
            folder,
            device=question.device,
            version=version or 0,
            base=None if root is None else stack.enter_context(base_of_run(root)),
            float32_head=run is not None and run.float32_head,
            longrope=None if run is None else run.longrope,
        )
    messages = [Message(role="user", content=question.prompt)]
    if question.system is not None:
        messages.insert(0, Message(role="system", content=question.system))
    prompt_tokens = render_prompt(tokenizer, messages)
    params = _params(question, root, room=engine.max_length - len(prompt_tokens))
    seeds = [derive_seed(question.seed, index) for index in range(question.n)]
    completions = generate_all(
        engine, [GenerationRequest(prompt_tokens=prompt_tokens, params=params, seed=seed) for seed in seeds]
    )
    return [
        SampledAnswer(
            text=decode(tokenizer, completion.tokens),
            tokens=completion.tokens,
            logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            policy_version=version,
        )
        for completion in completions
    ]


def _params(question: Question, root: Root | None, room: int) -> SamplingParams:
    """Return sampling parameters: the question's, else the run's, else the defaults. room: tokens left in the model."""
    values = overridden(run_of(root) if root else SamplingParams(), SAMPLING, question.run)
    if question.run.get("max_tokens") is None:
        values["max_tokens"] = max(1, min(values["max_tokens"], room))
    return SamplingParams(**values)


def _latest_version(root: Root) -> int:
    latest = latest_policy(root)
    if latest is None and is_recorded_run(root):
        raise ConfigError(
            f"{root.url} records another program's run, so no weights are in it; `ludic sample FOLDER_OR_ID` asks a "
            f"checkpoint of its trainer, or its first model, {root.record.model}"
        )
    if latest is None:
        raise ConfigError(
            f"{root.url} has published no policy yet; `ludic sample {root.record.model}` asks its first model"
        )
    return latest.version


def _stored_versions(root: Root) -> str:
    versions = stored_versions(root)
    return f"{len(versions)} from {versions[0]} to {versions[-1]}" if versions else "none"
