"""Merge LoRA adapters into their base model.

Reads peft's adapter_config.json and adapter_model.safetensors. Raises ModelError, which names the folder.
"""

import json
import warnings
from pathlib import Path

from safetensors import safe_open
from transformers import PreTrainedModel

from ludic.errors import ModelError, one_line

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def base_of_adapter(folder: str) -> str | None:
    """Return the folder or id of the base model of a LoRA adapter; None if the folder holds no adapter."""
    try:
        return json.loads(Path(folder, ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError) as error:
        raise ModelError(f"{folder}: {ADAPTER_CONFIG} names no base model: {one_line(error)}") from error


def merge_adapter(base: PreTrainedModel, folder: str, *, where: str | None = None) -> PreTrainedModel:
    """Return the base with W + (alpha / rank) B A for each adapted W. where: the folder's name in errors."""
    from peft import PeftModel, get_peft_model_state_dict  # takes seconds, not needed without LoRA

    where = where or folder
    try:
        with safe_open(Path(folder, ADAPTER_WEIGHTS), "pt") as file:
            found = set(file.keys())
        with warnings.catch_warnings(action="ignore"):  # warnings of missing names, which are refused below
            adapted = PeftModel.from_pretrained(base, folder, torch_device="cpu")
    except Exception as error:  # the type depends on what is broken
        raise ModelError(f"{where}: the LoRA adapter could not be loaded ({one_line(error)})") from error
    wanted = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    if found != wanted:
        raise ModelError(f"{where}: the LoRA adapter does not fit its config; differing: {sorted(found ^ wanted)}")
    return adapted.merge_and_unload()
