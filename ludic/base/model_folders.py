"""Check the JSON files of a model's folder before transformers, peft or vLLM reads them.

A folder may come with another user's root, and its files can name other files: an index names files of weights,
config.json names code of the Hub. Every function of ludic that loads a folder calls `check_model_folder` first. Imports
no torch. Raises ModelError, which names the file, the entry and its value.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ludic.base.paths import A_RELATIVE_PATH, RELATIVE_PATH
from ludic.errors import ModelError

ADAPTER_CONFIG = "adapter_config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_CHECKED = ("config*.json", "*.index.json", ADAPTER_CONFIG, _TOKENIZER_CONFIG, "generation_config.json")
_NAMES_FILES = ("weight_map", "transformers_weights", "configuration_files", "fast_tokenizer_files")
"""Entries whose values are files of the folder; transformers joins them to its path."""
_NAMES_CODE = "_implementation"
"""Suffix of entries that choose code, such as that of attention and of experts. A value with a slash names code on the
Hub."""


def check_model_folder(folder: str | Path) -> None:
    """Raise ModelError if a file of a local folder names files outside of it, or code of the Hub.

    A file that is not JSON is left to its reader.
    """
    for file in {file for pattern in _CHECKED for file in Path(folder).glob(pattern)}:
        values = _read(file)
        check_values(values, str(file))
        # transformers reads this index in the place of model.safetensors.index.json; it may be in a subfolder.
        name = values.get("transformers_weights") if isinstance(values, dict) else None
        if isinstance(name, str):
            index = Path(folder, name)
            check_values(_read(index) if index.suffix == ".json" else None, str(index))
    check_adapter(folder)


def check_values(values: Any, where: str) -> None:
    """Raise ModelError if the values of a configuration name files outside of its folder, or code of the Hub."""
    for key, value in _entries(values):
        if key.endswith((_NAMES_CODE, f"{_NAMES_CODE}_internal")):
            found = next((text for text in _texts(value) if "/" in text), None)
            if found is not None:
                raise ModelError(
                    f"{where}: {key} is {found!r}, which names code of the Hub; ludic runs none: delete this entry"
                )
        elif key in _NAMES_FILES:
            for text in set(_texts(value)):
                if not re.fullmatch(RELATIVE_PATH, text):
                    raise ModelError(f"{where}: {key} has {text!r}, wanted {A_RELATIVE_PATH}")


def check_adapter(folder: str | Path) -> None:
    """Raise ModelError if a local folder holds an adapter that is not of LoRA.

    peft reads files and imports modules that the configurations of other methods, and of Megatron, name.
    """
    file = Path(folder, ADAPTER_CONFIG)
    values = _read(file)
    if isinstance(values, dict):
        check_values(values, str(file))
        for key, wanted in (("peft_type", "LORA"), ("megatron_config", None)):
            if values.get(key, wanted) != wanted:
                raise ModelError(f"{file}: {key} is {values[key]!r}, wanted {wanted!r}: ludic loads LoRA adapters only")


def without_files(folder: str | Path) -> dict[str, None]:
    """Return arguments of AutoTokenizer.from_pretrained that override file names in tokenizer_config.json.

    transformers would otherwise open these files from anywhere on this machine. They are left over from the machine
    that wrote the file, so they are not an error.
    """
    values = _read(Path(folder, _TOKENIZER_CONFIG))
    return {key: None for key in values if key.endswith("_file")} if isinstance(values, dict) else {}


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes()) if file.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None


def _entries(values: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of all objects among JSON values, at any depth."""
    for each in _all(values):
        if isinstance(each, dict):
            yield from each.items()


def _texts(values: Any) -> Iterator[str]:
    """Yield the texts among JSON values, at any depth."""
    return (each for each in _all(values) if isinstance(each, str))


def _all(values: Any) -> Iterator[Any]:
    unseen = [values]
    while unseen:
        each = unseen.pop()
        yield each
        if isinstance(each, dict | list):
            unseen += each.values() if isinstance(each, dict) else each
