"""LoRA adapters as peft writes them, to be merged into the model that they adapt: adapter_config.json and
adapter_model.safetensors. Raises ModelError, which names the folder.
"""

import json
import warnings
from pathlib import Path

from safetensors import safe_open
from transformers import PreTrainedModel

from ludic.errors import ModelError, in_a_line


def base_of_adapter(folder: str) -> str | None:
    """Folder or id of the model that a folder holds a LoRA adapter of; None for a folder with a model."""
    try:
        return json.loads(Path(folder, "adapter_config.json").read_text())["base_model_name_or_path"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError) as error:
        raise ModelError(f"{folder}: adapter_config.json names no base model: {in_a_line(error)}") from error


def merge_adapter(base: PreTrainedModel, folder: str, *, where: str | None = None) -> PreTrainedModel:
    """The base with W + (alpha / rank) B A in place of each adapted W. where: what errors call the folder."""
    from peft import PeftModel, get_peft_model_state_dict  # takes seconds, which runs without LoRA need not wait

    where = where or folder
    try:
        with safe_open(Path(folder, "adapter_model.safetensors"), "pt") as file:
            found = set(file.keys())
        with warnings.catch_warnings(action="ignore"):  # of names that are missing, which are refused below
            adapted = PeftModel.from_pretrained(base, folder, torch_device="cpu")
    except Exception as error:  # as for a model, it depends on what is broken
        raise ModelError(f"{where}: the LoRA adapter could not be loaded ({in_a_line(error)})") from error
    wanted = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    if found != wanted:
        raise ModelError(f"{where}: the LoRA adapter does not fit its config; differing: {sorted(found ^ wanted)}")
    return adapted.merge_and_unload()
