"""Compute the next trainer's settings from those given now, a preset, the run's last trainer and a replayed run.

Reads attempts/ of the root, and attempts/ and checkpoints/ of a run to replay, whose settings the replay must have.
Settings given now override an algorithm's preset, which overrides earlier settings. Raises ConfigError for settings
that contradict each other. Imports no torch.
"""

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ludic.errors import ConfigError, MissingRootError
from ludic.root import (
    Attempt,
    CheckpointId,
    Root,
    chain,
    check_not_recorded,
    last_checkpoint,
    newest_attempt,
    newest_attempt_id,
    read_attempt,
    read_cut,
    read_parent,
)
from ludic.root.weights import same_model
from ludic.run import RunConfig, run_of
from ludic.settings import GONE, in_use, settings_of, without_tables
from ludic.settings import given as as_given
from ludic.training.batches.config import OFFLINE_SETTINGS
from ludic.training.config import ON_CPU, TrainConfig
from ludic.training.presets import load_algorithm

logger = logging.getLogger(__name__)

# --- The next trainer --------------------------------------------------------------------------------------------


def next_config(
    root_url: str, given: Mapping[str, Any], algorithm: str | None = None, *, online: bool = False
) -> TrainConfig:
    """Return the settings of the next trainer of a run.

    given: settings by name. algorithm: name of a preset. online: take over no setting of offline training.
    Raises ConfigError if the settings contradict each other, or if `given` names no setting.
    """
    preset = load_algorithm(algorithm) if algorithm is not None else {}
    given = without_tables(given, {each.name: each for each in settings_of(TrainConfig)})
    earlier = earlier_settings(root_url, given, online=online)
    stored = as_given(earlier, f"earlier settings of {root_url}", "stored")
    # Settings that an older ludic did not record had the values for the CPU.
    stored = {**ON_CPU, **stored} if stored else stored
    config = to_config({**stored, **preset, **given})
    if given.get("replay_batches") is None:
        _log_changes(root_url, earlier, config)
    return config


def _log_changes(root_url: str, earlier: Mapping[str, Any], config: TrainConfig) -> None:
    """Log the settings that differ from those of the run's last trainer, except the number of steps."""
    mine = json.loads(json.dumps(config.flat()))
    changes = [
        f"{name} {earlier[name]!r} becomes {mine[name]!r}"
        for name in mine
        if name in earlier and earlier[name] != mine[name] and name != "num_steps"
    ]
    if changes:
        logger.warning("%s continues with other settings than its last trainer: %s", root_url, ", ".join(changes))


def to_config(settings: Mapping[str, Any]) -> TrainConfig:
    """Return settings by name as a TrainConfig; lists, as JSON has them, become tuples. Raises ConfigError."""
    return TrainConfig.of(**settings)


def earlier_settings(root_url: str, given: Mapping[str, Any], *, online: bool = False) -> dict[str, Any]:
    """Return the settings of the run's newest trainer, or of the run to be replayed; {} if there is neither.

    given: settings given now, of which `replay_batches` matters.
    """
    replayed = None if online else given.get("replay_batches")
    earlier = replay_settings(replayed) if replayed is not None else _stored_settings(root_url)
    _answer_gone(root_url, earlier, given)
    return {name: value for name, value in earlier.items() if not (online and name in OFFLINE_SETTINGS)}


def _answer_gone(root_url: str, earlier: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Say which settings of the last trainer are gone, if it did otherwise than ludic does now.

    Raises ConfigError for one whose successor must be given.
    """
    for name in earlier.keys() & GONE.keys():
        gone, value = GONE[name], earlier[name]
        if value == gone.as_now:
            continue
        if gone.successor and gone.successor not in given:
            raise ConfigError(
                f"the last trainer of {root_url} had {name} {value!r}, which is gone: {gone.instead}; "
                f"set {gone.successor}, so that this one does what you want"
            )
        logger.warning("the last trainer of %s had %s %r, which is gone: %s", root_url, name, value, gone.instead)


def _stored_settings(root_url: str) -> Mapping[str, Any]:
    try:
        root = Root.open(root_url)
    except MissingRootError:
        return {}
    check_not_recorded(root)
    attempt_id = newest_attempt_id(root)
    return read_attempt(root, attempt_id).config if attempt_id else {}


# --- A replay ----------------------------------------------------------------------------------------------------


_FREE = frozenset(each.name for each in settings_of(TrainConfig) if not each.role.changes_weights)
"""Settings that do not change the weights once the batches are given."""


def replay_settings(url: str) -> dict[str, Any]:
    """Return the settings of a run that its replay must share. Raises ConfigError if the run has no checkpoint."""
    other = Root.open(url)
    attempt_id, _ = _end_of(other)
    # A run trained on a CPU is replayed on a CPU, even if CUDA is available.
    numerics = read_attempt(other, attempt_id).numerics
    on_cpu = numerics is not None and numerics.get("device") == "cpu"
    return _settings_of(other, attempt_id) | ({"device": "cpu"} if on_cpu else {})


def attempts_to_replay(url: str) -> Iterator[Attempt]:
    """Yield the attempts behind a run's newest checkpoint, newest first. Raises ConfigError if it has no checkpoint."""
    other = Root.open(url)
    attempt_id, _ = _end_of(other)
    for link in chain(attempt_id, partial(read_parent, other)):
        with contextlib.suppress(FileNotFoundError):
            yield read_attempt(other, link.attempt_id)


def check_replay(root: Root, other: Root, config: TrainConfig) -> tuple[CheckpointId, int]:
    """Return the attempt and step that a replay of another run on `root` ends with, and that run's num_steps.

    Raises ConfigError if that run began with another model, trained with other settings, or has no checkpoint.
    """
    if other.run_id == root.run_id:
        raise ConfigError(f"{root.url} is itself the run to replay; give the replay a root of its own")
    last = _end_of(other)
    settings = _settings_of(other, last[0])
    theirs, mine = (_run_settings(run, config) for run in (run_of(other), run_of(root)))
    _check_same(other.url, settings | theirs, config.flat() | mine, same_model(root, other))
    return last, settings["num_steps"]


def _end_of(other: Root) -> CheckpointId:
    """Return the attempt and step that a replay of a run ends with."""
    cut = read_cut(other)
    if cut is not None:
        return cut.end
    last = last_checkpoint(other, newest_attempt(other))  # its weights are not read
    if last is None:
        raise ConfigError(f"{other.url} has no complete checkpoint, so there is nothing to replay")
    return last.attempt_id, last.step


def _settings_of(other: Root, attempt_id: int) -> dict[str, Any]:
    stored = read_attempt(other, attempt_id).config
    config = in_use(TrainConfig, {**ON_CPU, **stored} if stored else stored)
    return {name: value for name, value in config.items() if name not in _FREE}


def _run_settings(run: RunConfig, config: TrainConfig) -> dict[str, Any]:
    """Settings of a run that weights depend on, once the batches are given."""
    # The seed draws the first weights of adapters.
    return {"float32_head": run.float32_head} | ({} if config.model.lora_rank is None else {"seed": run.seed})


def _check_same(url: str, theirs: Mapping[str, Any], mine: Mapping[str, Any], models: str) -> None:
    """Raise ConfigError if settings or models differ. Settings are compared as JSON values.

    models: how the first models differ, in a sentence; empty if they are equal.
    """
    mine = json.loads(json.dumps(mine))
    differing = [name for name in theirs if name in mine and theirs[name] != mine[name] and name != "num_steps"]
    found = ", ".join(f"{name} is {theirs[name]!r} there and {mine[name]!r} here" for name in differing)
    if differing or models:
        found = "; ".join(filter(None, [models, found]))
        raise ConfigError(f"{url} was trained with other settings, so a replay would not repeat it: {found}")
