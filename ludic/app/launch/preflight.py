"""Check a run before it starts, for `ludic check` and in the first seconds of `ludic run`.

Before a root is created or a process started, the checks find mistakes that would end a process again and again: a
missing package, a server that does not answer, a model without a chat template, missing LoRA targets, a full disk, SQL
that returns no number, a failing environment. Each check returns its result, or raises a LudicError with the remedy.
`checks` run no users' code; `code_checks` do, and so come after consent.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ludic.app.launch.config import Start
from ludic.app.launch.gpus import gpu_plan
from ludic.app.launch.local import check_launch
from ludic.app.launch.roots import check_option_names, uses_of
from ludic.app.launch.trial import Trial, TrialNote
from ludic.base import TRAIN, is_url, require, size, visible_gpus
from ludic.environments import event_loops
from ludic.errors import ConfigError, LudicError, ModelError, StoreError, one_line
from ludic.records import Message
from ludic.root.weights import first_small_files, latest_policy, local_folder, weight_files
from ludic.run import files_to_check
from ludic.settings import NO_FILES, CodeSettings, Files
from ludic.settings.user_files import QUESTIONS
from ludic.training import require_account, require_tracker

logger = logging.getLogger(__name__)


Check = Callable[[], TrialNote | str]


def check_start(start: Start, *, has_workers: bool = True) -> None:
    """Run all checks without users' code; log doubtful results. Raises LudicError at the first mistake.

    has_workers: false for a trainer of stored rollouts alone.
    """
    with checks(start, has_workers=has_workers) as found:
        _run(found)


def consented_files(start: Start, code: CodeSettings) -> Files:
    """Return the users' files that a run would use, and store nothing. Raises ConsentError, ConfigError."""
    return NO_FILES if start.root is None else files_to_check(start.root, uses_of(start.root, start.train), code)


def check_code(start: Start, files: Files) -> None:
    """Run the checks of users' code; log doubtful results. Raises LudicError at the first mistake.

    files: contents that replace those on disk.
    """
    _run(code_checks(start, files))


def try_all(checks: Mapping[str, Check], rows: Sequence[Mapping[str, str]] = ()) -> list[Mapping[str, str]]:
    """Run all checks; returns rows of earlier ones, and for each a row with `check`, `state` and `found`.

    state: ok, look (doubtful), wrong, or left out, for the same mistake as an earlier one.
    """
    tried = list(rows)
    for name, check in checks.items():
        try:
            found = check()
        except LudicError as error:
            text, state = one_line(error).removeprefix(f"{name}: "), "wrong"
            if any(row["found"] == text for row in tried):
                text, state = "the same mistake as above", "left out"
        else:
            text = (found.text if isinstance(found, TrialNote) else found).removeprefix(f"{name}: ")
            state = "look" if isinstance(found, TrialNote) and found.is_doubtful else "ok"
        tried.append({"check": name, "state": state, "found": text})
    return tried


def _run(checks: Mapping[str, Check]) -> None:
    for name, check in checks.items():
        found = check()
        if isinstance(found, TrialNote) and found.is_doubtful:
            logger.warning("%s: %s", name, found.text)


@contextmanager
def checks(start: Start, *, has_workers: bool = True) -> Iterator[Mapping[str, Check]]:
    """Yield the checks that run no users' code, by name, in order; a copy of a remote model lasts for the block.

    has_workers: as in `check_start`.
    """
    with ExitStack() as stack:
        model = _Model(start, stack)
        found: dict[str, Check] = {
            "settings": partial(_check_settings, start, has_workers=has_workers),
            "packages": partial(_check_packages, start),
            "model": model.check,
            "chat template": model.check_template,
            "tool calls": model.check_tool_format,
            "reference": model.check_reference,
            "adapters": model.check_adapters,
            "experts": model.check_experts,
            "server": partial(_check_server, start),
            "disk": model.check_disk,
            "memory": model.check_memory,
        }
        yield {name: check for name, check in found.items() if has_workers or name not in ("server", "memory")}


def code_checks(start: Start, files: Files = NO_FILES) -> Mapping[str, Check]:
    """Return the checks that run users' code, by name, in order. files: contents that replace those on disk."""
    trial = Trial(start, files)
    of_environments = {
        f"environment {name}": partial(trial.check_environment, name) for name in dict.fromkeys(start.run.env)
    }

    def check_prompts() -> TrialNote | str:
        with ExitStack() as stack:
            return trial.check_prompts(_Model(start, stack).folder)

    return {"code": trial.check, **of_environments, "prompts": check_prompts, "SQL": trial.check_sql}


# --- Settings, packages, servers ---------------------------------------------------------------------------------


_HIGHEST_LEARNING_RATE = 1.0
"""AdamW moves a weight by up to the learning rate in a step, and the weights of language models are below 1."""


def _check_settings(start: Start, *, has_workers: bool) -> TrialNote | str:
    text = _check_processes(start) if has_workers else "a trainer on stored rollouts"
    rate = start.train.optimizer.learning_rate
    if rate <= _HIGHEST_LEARNING_RATE:
        return text
    return TrialNote(
        f"{text}; learning_rate is {rate:g}, by which AdamW moves each weight in a step, and most weights are far "
        "below 1; usual are 1e-6 to 1e-3",
        is_doubtful=True,
    )


def _check_processes(start: Start) -> str:
    check_launch(start.train, start.processes, start.engine, start.run.num_workers)
    check_option_names(start.run)
    _check_steps(start)
    if start.processes.launcher != "local":
        return f"{start.train.num_steps} steps on {start.processes.launcher}"
    num_workers = start.processes.workers_of(start.run.num_workers)
    num_engines = start.processes.engines_of(start.run.num_workers)
    plan = gpu_plan(start.train, start.processes, start.engine, num_engines, visible_gpus())
    if plan is None and start.train.model.device == "cuda":
        raise ConfigError("device is cuda, and this machine shows no GPU; leave it out, or set device to cpu")
    where = "the CPU" if plan is None or start.train.model.device == "cpu" else "GPUs"
    return f"{start.train.num_steps} steps on {where}, workers: {num_workers}, ranks: {start.processes.ranks}"


def _check_steps(start: Start) -> None:
    """Raise ConfigError for a new run of questions alone whose max_steps is meant for the trainer, as in TRL."""
    max_steps = start.run.max_steps
    if start.root is None and max_steps is not None and all(each.startswith(QUESTIONS) for each in start.run.env):
        raise ConfigError(
            f"max_steps is {max_steps}, the most steps of an environment in an episode, and a question has one; the "
            "steps of the trainer are num_steps"
        )


def _check_packages(start: Start) -> str:
    require("torch", TRAIN, "workers and trainers")
    needed = []
    if start.engine.is_vllm:
        from ludic.engines import check_installed

        check_installed()
        needed.append("vllm")
    if (log_to := start.train.tracker.log_to) != "none":
        require_tracker(log_to)
        if start.processes.launcher == "local":  # otherwise the trainer may run on a machine with another account
            require_account(log_to)
        needed.append(log_to)
    if start.processes.launcher == "ray":
        require("ray", "ray", "launcher is ray")
        needed.append("ray")
    return f"{', '.join(needed)} can be imported" if needed else "none are needed beyond those of ludic"


def _check_server(start: Start) -> TrialNote | str:
    if start.engine.chosen() != "server":
        return f"none, the engine is {start.engine.chosen()}"
    from ludic.engines import find_silent

    silent: dict[str, str] = {}

    async def find() -> None:
        silent.update(await find_silent(start.engine.server_url))

    event_loops.run(find())
    urls = dict.fromkeys(start.engine.server_url)
    if not silent:
        return f"{', '.join(urls)} answers"
    why = "; ".join(silent.values())
    if len(silent) < len(urls):
        return TrialNote(f"{why}; the others sample without it", is_doubtful=True)
    if start.root is not None and latest_policy(start.root) is None:
        # `ludic serve` waits for the first version, which the run publishes.
        return TrialNote(f"{why}; workers wait for a server, such as of `ludic serve {start.url}`", is_doubtful=True)
    made = (
        "`ludic serve ROOT`, for a root that `ludic run --create-only` has made"
        if start.root is None
        else f"`ludic serve {start.url}`"
    )
    raise ConfigError(f"no server answers ({why}); start one ({made}, or docs/engines.md), or correct --server-url")


# --- The model and the disk --------------------------------------------------------------------------------------

_WORD_BYTES = {"bfloat16": 2, "float16": 2}
_SMALL = 20_000_000
"""Maximum weights for which memory on a CPU is not planned, which takes seconds: with activations, some GB."""
_OPTIMIZER_BYTES = 12
"""Bytes of a trained weight in a checkpoint: the weight and two moments of AdamW, in float32."""


class _Model:
    """The run's first model, by its small files; weights are measured and not read."""

    def __init__(self, start: Start, stack: ExitStack) -> None:
        self._start, self._stack = start, stack

    @cached_property
    def folder(self) -> Path:
        """Local folder with the configuration and the tokenizer. Raises ModelError if there is no such model."""
        root, run = self._start.root, self._start.run
        if root is None or run.model != root.record.model:
            return self._stack.enter_context(local_folder(run.model, with_weights=False))
        return self._stack.enter_context(first_small_files(root))

    @cached_property
    def config(self) -> Mapping[str, Any]:
        try:
            found = json.loads((self.folder / "config.json").read_bytes())
        except FileNotFoundError:
            raise ModelError(
                f"{self._start.run.model}: {self.folder} holds no config.json; wanted a Hugging Face folder of a model"
            ) from None
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.folder / 'config.json'} can't be read: {error}; fetch the model again") from error
        return found if isinstance(found, dict) else {}

    def check(self) -> str:
        return f"{self._start.run.model}, {self.config.get('model_type', 'of an unknown type')}"

    def check_template(self) -> str:
        """Look for the template's files first: transformers takes seconds to import."""
        if any(self.folder.glob("chat_template*")) or any(self.folder.glob("additional_chat_templates/*")):
            return "there is one"
        with suppress(OSError, ValueError):
            if json.loads((self.folder / "tokenizer_config.json").read_bytes()).get("chat_template"):
                return "there is one"
        from ludic.models import read_tokenizer, render_prompt

        tokenizer = read_tokenizer(str(self.folder))
        tokenizer.name_or_path = self._start.run.model
        render_prompt(tokenizer, [Message(role="user", content="made up")])
        return "the tokenizer has one"

    def check_tool_format(self) -> TrialNote | str:
        """Say how tool calls are read, if the run's settings name tools; an environment may have others."""
        run = self._start.run
        if run.tool_format is not None or not (run.tools or run.sub_agents):
            return run.tool_format or "no tools"
        from ludic.agents import likely_format
        from ludic.models import load_tokenizer

        name, doubt = likely_format(load_tokenizer(str(self.folder)))
        return name if doubt is None else TrialNote(f"read as {name}: {doubt}", is_doubtful=True)

    def check_reference(self) -> str:
        """Check that the reference model exists, which the trainer loads after its start."""
        reference = self._start.train.loss.reference
        if reference is None:
            return "none"
        root = self._start.root
        # The trainer of an existing run finds its first model itself.
        if reference in (self._start.run.model, None if root is None else root.record.model):
            return "the run's model"
        try:
            folder = self._stack.enter_context(local_folder(reference, with_weights=False))
            if not (folder / "config.json").is_file():
                raise ModelError(f"{reference}: holds no config.json; wanted a Hugging Face folder of a model")
        except ModelError as error:
            raise ModelError(f"reference {error}") from error
        return reference

    def check_adapters(self) -> str:
        """Add the adapters to the model without its weights; only targets that the user names may be wrong."""
        settings = self._start.train.model
        if settings.lora_rank is None or not settings.lora_targets:
            return "none" if settings.lora_rank is None else "on all linear layers but the head and experts"
        from ludic.models import try_adapters

        rank, alpha, targets = settings.lora_rank, settings.lora_alpha, settings.lora_targets
        layers = try_adapters(str(self.folder), source=self._start.run.model, rank=rank, alpha=alpha, targets=targets)
        return f"on {layers} layers"

    def check_experts(self) -> str:
        """Check for experts to keep or replay, without the model's weights."""
        if not self._start.run.keep_experts and not self._start.train.batch.replay_experts:
            return "not kept"
        from ludic.models import load_config, routing_of

        routing = routing_of(load_config(str(self.folder)), self._start.run.model)
        return f"{routing.chosen} of {routing.num_experts} in {len(routing.layers)} layers"

    @property
    def _num_weights(self) -> int | None:
        """Number of weights, at least; None if their files are not on this machine."""
        model = self._start.run.model
        folder = self.folder if is_url(model) or not Path(model).expanduser().is_dir() else Path(model).expanduser()
        sizes = [(folder / name).stat().st_size for name in weight_files(folder)]
        stored = self.config.get("dtype") or self.config.get("torch_dtype")
        return sum(sizes) // _WORD_BYTES.get(str(stored), 4) or None

    def check_disk(self) -> TrialNote | str:
        """Compare the free space with a checkpoint and two versions, and with all that are kept."""
        url, settings = self._start.url, self._start.train
        if is_url(url):
            return f"{url} is not a folder of this machine"
        place = Path(url).absolute()
        while not place.exists():
            place = place.parent
        try:
            free = shutil.disk_usage(place).free
        except OSError as error:
            raise StoreError(f"{place} can't be read: {error.strerror or error}") from error
        if not os.access(place, os.W_OK):
            raise StoreError(f"{place} can't be written by this user; choose another folder for the root")
        if self._num_weights is None:
            return f"{size(free)} are free at {place}"
        adapters = settings.model.lora_rank is not None
        dtype = settings.model.publish_dtype or settings.model.dtype
        if dtype is None and settings.model.device != "cpu" and visible_gpus():
            dtype = "bfloat16"  # as ludic.training.device_defaults chooses
        word = 2 if dtype == "bfloat16" else 4
        version = 0 if settings.model.publish_lora == "adapter" else self._num_weights * word
        checkpoint = 0 if adapters else self._num_weights * _OPTIMIZER_BYTES
        least = checkpoint + 2 * version
        if free < least:
            raise ConfigError(
                f"{size(free)} are free at {place}, and one checkpoint and two versions of {self._start.run.model} "
                f"take {size(least)}; free some space, or choose another folder for the root"
            )
        kept = (settings.checkpoint.keep_checkpoints, settings.checkpoint.keep_policies)
        most = checkpoint * ((kept[0] or 0) + 1) + version * ((kept[1] or 0) + 1)
        text = f"{size(free)} are free at {place}; checkpoints and versions take up to {size(most)}"
        if None in kept:
            each = f"each checkpoint takes {size(checkpoint)}, each version {size(version)}"
            return f"{size(free)} are free at {place}; {each}"
        advice = "; lower keep_checkpoints or keep_policies" if free < most else ""
        return TrialNote(text + advice, is_doubtful=free < most)

    def check_memory(self) -> TrialNote | str:
        """Compare what each process needs with the memory of this machine's GPUs, or of the machine."""
        start = self._start
        if start.processes.launcher != "local":
            return f"not checked on {start.processes.launcher}; `ludic plan` shows the needed memory"
        if self._num_weights is not None and self._num_weights < _SMALL and not visible_gpus():
            return f"a model of {self._num_weights:,} weights is small beside this machine"
        from ludic.app.launch.plan import Settings, local_machine, plan
        from ludic.models import load_config

        config, machine = load_config(str(self.folder)), local_machine()
        wanted = Settings(run=start.run, train=start.train, processes=start.processes, engine=start.engine)
        found = plan(config, wanted, machine)
        if found.problems:
            text = "; ".join([*found.problems, *filter(None, [found.advice]), "`ludic plan` shows the parts"])
            return TrialNote(text, is_doubtful=True)
        place = "GPU" if machine.gpus else "host"
        needs = [f"{need.process} {size(need.total)}" for need in found.needs if need.place == place]
        return f"{', '.join(needs)} of {'a GPU' if machine.gpus else 'this machine'}; `ludic plan` shows the parts"
