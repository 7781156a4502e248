"""`ludic sample ROOT|MODEL --prompt TEXT`: sample answers from a run's policy or from a model."""

import logging
from typing import Any

from rich.console import Console
from rich.text import Text

import ludic
from ludic.cli.flags.sample import Settings
from ludic.errors import ConfigError, MissingRootError, StoreError
from ludic.models.first_model import is_hub_id
from ludic.rollouts.sample import Answer, sample_model
from ludic.settings import flat
from ludic.store.filesystem import Storage
from ludic.viewer.output import number, print_json, printable, stdout_console

logger = logging.getLogger(__name__)


def main(settings: Settings) -> None:
    run = _open_run(settings.source)
    if run is None and settings.version is not None:
        raise ConfigError(f"{settings.source} is a model, not a run, so it has no version {settings.version}")
    with Console(stderr=True).status(f"sampling {settings.question.n} from {settings.source}"):
        if run is None:
            answers = sample_model(settings.source, settings.question)
        else:
            answers = run.sample(**flat(settings.question), version=settings.version)
    if settings.json:
        version = answers[0].policy_version
        print_json({"source": settings.source, "policy_version": version, "answers": [_plain(a) for a in answers]})
    else:
        _print(stdout_console(), answers)


def _open_run(source: str) -> ludic.Run | None:
    """Open the run; returns None if the source may be a model. Raises MissingRootError if it can be neither."""
    try:
        return ludic.open(source)
    except (MissingRootError, StoreError) as error:
        if Storage.connect(source).exists("config.json"):
            return None
        if is_hub_id(source):
            logger.info("there is no folder %s here; asking Hugging Face for a model of that name", source)
            return None
        if isinstance(error, StoreError):
            raise
        raise MissingRootError(f"{source} holds neither a run (run.json) nor a model (config.json)") from None


def _plain(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "mean_logprob": answer.mean_logprob,
        "tokens": answer.tokens.tolist(),
        "logprobs": answer.logprobs.tolist(),
    }


def _print(console: Console, answers: list[Answer]) -> None:
    for index, answer in enumerate(answers):
        facts = f"{index + 1}: {len(answer.tokens)} tokens, finish_reason {answer.finish_reason}"
        console.print(Text(f"{facts}, mean logprob {number(answer.mean_logprob, 4)}", style="dim"))
        console.print(Text(printable(answer.text)), soft_wrap=True)
