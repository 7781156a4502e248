"""Settings that a trainer takes over: from the run's newest attempt, or from the run that it replays.

Reads attempts/ of the root. An algorithm's preset overrides them, and settings given now override both. Imports no
torch.
"""

from collections.abc import Mapping
from typing import Any

from ludic.batches.config import OFFLINE_SETTINGS
from ludic.errors import MissingRootError
from ludic.settings import given as as_given
from ludic.store import Root, newest_attempt_id, read_attempt
from ludic.training.config import TrainConfig
from ludic.training.presets import load_algorithm


def next_config(
    root_url: str, given: Mapping[str, Any], algorithm: str | None = None, *, online: bool = False
) -> TrainConfig:
    """Return the settings of the next trainer of a run.

    given: settings by name. algorithm: name of a preset. online: take over no setting of offline training.
    Raises ConfigError if the settings contradict each other, or if `given` names no setting.
    """
    preset = load_algorithm(algorithm) if algorithm is not None else {}
    earlier = earlier_settings(root_url, given, online=online)
    earlier = as_given(earlier, f"earlier settings of {root_url}", "stored")
    return to_config({**earlier, **preset, **given})


def to_config(settings: Mapping[str, Any]) -> TrainConfig:
    """Return settings by name as a TrainConfig; lists, as JSON has them, become tuples. Raises ConfigError."""
    return TrainConfig.of(**settings)


def earlier_settings(root_url: str, given: Mapping[str, Any], *, online: bool = False) -> dict[str, Any]:
    """Return the settings of the run's newest trainer, or of the run to be replayed; {} if there is neither.

    given: settings given now, of which `replay_batches` matters.
    """
    replayed = None if online else given.get("replay_batches")
    earlier = _replayed_settings(replayed) if replayed is not None else _stored_settings(root_url)
    return {name: value for name, value in earlier.items() if not (online and name in OFFLINE_SETTINGS)}


def _replayed_settings(url: str) -> Mapping[str, Any]:
    from ludic.training.replay_settings import replay_settings

    return replay_settings(url)


def _stored_settings(root_url: str) -> Mapping[str, Any]:
    try:
        root = Root.open(root_url)
    except MissingRootError:
        return {}
    attempt_id = newest_attempt_id(root)
    return read_attempt(root, attempt_id).config if attempt_id else {}
