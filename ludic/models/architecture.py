"""Read config.json and generation_config.json, and check that a folder's weights fit a model in use.

Reads headers only, and loads no weights. Raises ModelError, which names the folder or the file.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from ludic.errors import ModelError, one_line
from ludic.models.weight_files import (
    MAKING_MODELS,
    can_read_into,
    check_tensors,
    first_unknown_name,
    load_pretrained,
    open_weights,
)

# Config entries that may differ between folders of the same architecture.
_NOT_ARCHITECTURE = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}


def load_config(folder: str) -> PretrainedConfig:
    """Return a folder's config.json."""
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, TypeError, ...: depends on what is broken
        raise ModelError(f"{folder}: no config.json that transformers can use: {one_line(error)}") from error


def check_same_architecture(current: PretrainedConfig, other: PretrainedConfig, folder: str) -> None:
    """Raise ModelError, with the differences, if weights of the folder's config `other` do not fit `current`."""
    ours, theirs = _architecture(current.to_dict()), _architecture(other.to_dict())
    names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if names:
        differences = ", ".join(f"{name} {theirs.get(name)} instead of {ours.get(name)}" for name in names)
        raise ModelError(f"{folder}: another architecture than the model in use: {differences}")


def _architecture(config: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _architecture(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in _NOT_ARCHITECTURE
    }


def check_folder(folder: str, current: PretrainedConfig) -> None:
    """Raise ModelError unless the folder holds whole weights of the architecture `current`.

    Compares names, shapes and dtypes with a model without memory. Weights that transformers would have to convert are
    loaded once, to see whether they fit.
    """
    if not Path(folder).is_dir():
        raise ModelError(f"{folder}: there is no such folder")
    check_same_architecture(current, load_config(folder), folder)
    with MAKING_MODELS, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(current)
    if not can_read_into(model):
        load_pretrained(folder, dtype=None, use_safetensors=True)
        return
    with open_weights(folder) as stored:
        if difference := first_unknown_name(stored, model, folder):
            raise ModelError(difference)
        check_tensors(stored, model)


def eos_token_ids(config: PretrainedConfig, generation: GenerationConfig | None) -> tuple[int, ...]:
    """Return all end-of-sequence tokens of a model; generation_config.json may name one, several or none."""
    ids = None if generation is None else generation.eos_token_id
    if ids is None:
        ids = config.get_text_config().eos_token_id
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def load_generation_config(folder: str) -> GenerationConfig | None:
    """Return a folder's generation_config.json; None if it has none."""
    if not Path(folder, "generation_config.json").exists():
        return None
    try:
        return GenerationConfig.from_pretrained(folder)
    except Exception as error:  # OSError, ValueError, ...: depends on what is broken
        raise ModelError(f"{folder}: no generation_config.json that transformers can use: {one_line(error)}") from error
