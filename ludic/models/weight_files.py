"""Load models, and read a Hugging Face folder into a loaded model without a second copy in memory.

`load_pretrained` is the one way in which ludic loads a model, and reads what transformers reads; `make_model` is the
one way in which it makes a model without weights. Both choose the implementations of attention and experts, since a
config.json can name code of the Hub there. The other functions read model.safetensors, or the shards that
model.safetensors.index.json names. Raises ModelError, which names the folder or the file. Headers are checked before
any parameter changes. Files are read, not memory-mapped: reading a mapped file that shrank kills the process (SIGBUS).
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from threading import RLock
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import ModuleList
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from ludic.base import Longrope, check_model_folder, check_values
from ludic.errors import ModelError, one_line
from ludic.models.rope import pin_rope

MAKING_MODELS = RLock()
"""Held while transformers creates a model: it changes its classes meanwhile, so another thread's model would lack tied
weights."""

_BUFFER_BYTES = 4 << 20
"""735 MB take 0.13 s with this buffer, 0.19 s with 256 KiB or 16 MiB."""
GENERATION_FILE = "generation_config.json"
_FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes that are converted to the model's."""
_DTYPES = _FLOATS | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in an open file."""

    path: Path
    file: BufferedReader
    start: int
    """First byte in the file."""
    shape: tuple[int, ...]
    dtype: str
    """Name in the safetensors format."""


def load_pretrained(
    folder: str,
    *,
    dtype: torch.dtype | None,
    where: str | None = None,
    strict: bool = True,
    longrope: Longrope | None = None,
    kind: Any = AutoModelForCausalLM,
    attn_implementation: str | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Load a model into CPU memory, in eval mode. dtype: None keeps the dtype of the weights.

    where: the folder's name in errors. longrope: factors of a longrope model; None is short. kind: auto class of
    transformers, by default of causal language models. attn_implementation: None is transformers' choice. options:
    further arguments of its from_pretrained. Raises ModelError if a weight is missing or has another shape than
    config.json says, if a file names one outside of the folder, or code of the Hub, for rotary positions that depend on
    a pass, and if strict, for a weight that is not used.
    """
    where = where or folder
    try:
        with MAKING_MODELS, without_progress_bars():
            model, report = kind.from_pretrained(
                folder,
                # Without it, transformers would prefer what config.json says of attention to the argument.
                config=_read_config(folder),
                attn_implementation=attn_implementation,
                experts_implementation=None,
                dtype=dtype or "auto",
                device_map=None,
                trust_remote_code=False,  # the default None would prompt in the terminal
                ignore_mismatched_sizes=True,  # so that the report has them; refused below
                output_loading_info=True,
                **options,
            )
    except ModelError:
        raise
    except Exception as error:  # the type depends on what is broken: OSError, SafetensorError, KeyError, ...
        raise _could_not_be_loaded(where, error) from error
    _check_loaded(where, report, strict=strict)
    # Loaded weights are the memory-mapped file: if the file shrank later, the process would be killed (SIGBUS).
    for weight in model.parameters():
        weight.data = weight.data.clone()
    if model.can_generate() and (generation := load_generation_config(folder)) is not None:
        model.generation_config = generation
    return repaired(model, longrope)


def make_model(
    config: PretrainedConfig,
    *,
    attention: str | None = None,
    experts: str | None = None,
    dtype: torch.dtype | None = None,
    longrope: Longrope | None = None,
) -> PreTrainedModel:
    """Make a causal language model with new weights, on the device in use.

    attention, experts: their implementations; None is transformers' choice, whatever the configuration says. dtype: of
    the weights; None is the configuration's. longrope: factors of a longrope model; None is short.
    """
    options = {} if dtype is None else {"dtype": dtype}
    with MAKING_MODELS:
        model = AutoModelForCausalLM.from_config(
            deepcopy(config),  # it may belong to a model in use
            attn_implementation=attention,
            experts_implementation=experts,
            trust_remote_code=False,
            **options,
        )
    return repaired(model, longrope)


def repaired(model: PreTrainedModel, longrope: Longrope | None = None) -> PreTrainedModel:
    """Correct errors of transformers 5.19 in a model, in place, and return it; every new model needs this.

    Nemotron-H takes time_step_min for the lowest time step, in a pass over many tokens only, so that tokens that are
    sampled one by one get other logprobs. Its configuration says time_step_limit. Rotary positions may depend on the
    longest row of a pass: see `pin_rope`, which takes longrope and whose errors are raised.
    """
    limit: Any = getattr(model.config.get_text_config(decoder=True), "time_step_limit", None)
    for module in model.modules() if limit is not None else ():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(limit)
    pin_rope(model, longrope)
    return model


def _check_loaded(where: str, report: Mapping[str, Any], *, strict: bool) -> None:
    """Raise ModelError for weights that do not fit. report: from from_pretrained with output_loading_info."""
    if report["mismatched_keys"]:
        shapes = {
            f"{name} {tuple(found)}, the model's is {tuple(wanted)}"
            for name, found, wanted in report["mismatched_keys"]
        }
        raise ModelError(f"{where}: the weights hold {_some(shapes)}; wanted those of its config.json")
    if report["missing_keys"]:
        raise ModelError(f"{where}: the weights lack {_some(report['missing_keys'])}; the folder is incomplete")
    if strict and report["unexpected_keys"]:
        raise ModelError(f"{where}: the weights hold {_some(report['unexpected_keys'])}, which the model does not use")


def _some(names: set[str]) -> str:
    """Return the first three names of a set, and the number of further names."""
    first, more = sorted(names)[:3], len(names) - 3
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars, which a trainer would show at every published version."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def can_read_into(model: PreTrainedModel) -> bool:
    """Return whether files store the model's parameters unchanged: not quantized, split into parts or transposed."""
    return (
        not get_model_conversion_mapping(model, add_legacy=False)
        and getattr(model, "hf_quantizer", None) is None
        and getattr(model.config, "transformers_weights", None) is None
        and all(tensor.is_contiguous() for tensor in model.state_dict().values())
    )


@contextmanager
def open_weights(folder: str) -> Iterator[dict[str, StoredTensor]]:
    """Open all files of a folder's weights and yield their tensors by name, in the order of the files."""
    with ExitStack() as files:
        yield {name: tensor for path in _paths(Path(folder)) for name, tensor in _open(path, files).items()}


def first_unknown_name(stored: Mapping[str, StoredTensor], model: PreTrainedModel, folder: str) -> str | None:
    """Return an error's text for the first name that only the model or only the files have; None if there is none.

    A parameter that has several names, as tied embeddings do, is stored under one of them.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    missing = sorted(group[0] for group in names.values() if not stored.keys() & set(group))
    if missing:
        return _does_not_fit(_source(Path(folder)), f"missing_keys, the first of {len(missing)}: {missing[0]}")
    known = {next(name for name in group if name in stored) for group in names.values()}
    unexpected = sorted(stored.keys() - known)
    if unexpected:
        path, found = stored[unexpected[0]].path, f"the first of {len(unexpected)}: {unexpected[0]}"
        return _does_not_fit(path, f"unexpected_keys, {found}")
    return None


def check_tensors(stored: Mapping[str, StoredTensor], model: PreTrainedModel) -> None:
    """Raise ModelError for the first tensor whose shape or dtype does not fit the model's parameter of its name."""
    parameters = model.state_dict()
    for name, tensor in stored.items():
        wanted = parameters[name]
        if tensor.shape != tuple(wanted.shape):
            shapes = f"{name} is {tensor.shape}, the model's is {tuple(wanted.shape)}"
            raise ModelError(_does_not_fit(tensor.path, f"mismatched_keys, the first: {shapes}"))
        if not (_DTYPES.get(tensor.dtype) == wanted.dtype or (tensor.dtype in _FLOATS and wanted.is_floating_point())):
            dtypes = f"{tensor.dtype}, which does not convert to the model's {str(wanted.dtype).removeprefix('torch.')}"
            raise ModelError(_does_not_fit(tensor.path, f"{name} is {dtypes}"))


def read_into(model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> None:
    """Copy tensors that passed `check_tensors` into the parameters with their names.

    Raises ModelError if a file can't be read; some parameters then have new values and others old ones.
    """
    parameters, buffer = model.state_dict(), torch.empty(_BUFFER_BYTES, dtype=torch.uint8)
    for name, tensor in stored.items():
        try:
            with torch.no_grad():
                _read(tensor, parameters[name], buffer)
        except (OSError, EOFError) as error:
            raise ModelError(f"{tensor.path}: reading {name} failed half-way ({one_line(error)})") from error


def _read(tensor: StoredTensor, parameter: Tensor, buffer: Tensor) -> None:
    dtype = _DTYPES[tensor.dtype]
    tensor.file.seek(tensor.start)
    for part in parameter.view(-1).split(len(buffer) // dtype.itemsize):
        data = buffer[: len(part) * dtype.itemsize]
        if tensor.file.readinto(data.numpy().data) != len(data):
            raise EOFError("the file ends early")
        part.copy_(data.view(dtype))


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a safetensors file, by name."""
    with ExitStack() as files:
        return {name: tensor.shape for name, tensor in _open(path, files).items()}


def _paths(folder: Path) -> list[Path]:
    source = _source(folder)
    if source.suffix == ".safetensors":
        return [source]
    try:
        index = json.loads(source.read_bytes())
        check_values(index, str(source))
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _could_not_be_loaded(source, error) from error


def _source(folder: Path) -> Path:
    """Return the file that transformers reads first."""
    index = folder / "model.safetensors.index.json"
    whole = folder / "model.safetensors"
    return index if index.exists() and not whole.exists() else whole


def _open(path: Path, files: ExitStack) -> dict[str, StoredTensor]:
    try:
        with safe_open(path, "pt"):  # checks that the header is sound and the file as long as it says
            pass
        file = files.enter_context(path.open("rb"))
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    except (OSError, ValueError, SafetensorError) as error:
        raise _could_not_be_loaded(path, error) from error
    return {
        name: StoredTensor(
            path=path,
            file=file,
            start=8 + length + entry["data_offsets"][0],
            shape=tuple(entry["shape"]),
            dtype=entry["dtype"],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _could_not_be_loaded(path: Path | str, error: Exception) -> ModelError:
    return ModelError(
        f"{path}: the weights could not be loaded ({one_line(error)}); "
        "wanted config.json and model.safetensors, or its shards with model.safetensors.index.json, all complete"
    )


def _does_not_fit(path: Path, difference: str) -> str:
    return f"{path}: the weights do not fit config.json; {difference}"


# --- Configuration: config.json and generation_config.json ---------------------------------------------
# Reads headers only, and loads no weights, to check that a folder's weights fit a model in use.

# Config entries that may differ between folders of the same architecture.
_NOT_ARCHITECTURE = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}


def load_config(folder: str) -> PretrainedConfig:
    """Return a folder's config.json.

    Raises ModelError if there is none that transformers can use, or if a file of the folder names one outside of it, or
    code of the Hub: all loaders of a folder, also vLLM, read its configuration first.
    """
    try:
        return _read_config(folder)
    except ModelError:
        raise
    except Exception as error:  # OSError, ValueError, TypeError, ...: depends on what is broken
        raise ModelError(f"{folder}: no config.json that transformers can use: {one_line(error)}") from error


def make_config(values: Mapping[str, Any]) -> PretrainedConfig:
    """Return a configuration from values as its to_dict gives them. Raises ModelError as `load_config`."""
    others = {name: value for name, value in values.items() if name != "model_type"}
    check_values(others, values["model_type"])
    return AutoConfig.for_model(values["model_type"], **others)


def _read_config(folder: str) -> PretrainedConfig:
    _check_files(folder)
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _check_files(folder: str) -> None:
    """Raise ModelError if a file of a folder, or the config.json of a Hugging Face id, names files that ludic never
    opens."""
    if Path(folder).is_dir():
        check_model_folder(folder)
        return
    values = None
    with suppress(OSError, ValueError):  # loading reports the error
        values = PretrainedConfig.get_config_dict(folder)[0]
    check_values(values, folder)


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
    with torch.device("meta"):
        model = make_model(current)
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


class StoredGenerationConfig(GenerationConfig):
    """A generation_config.json that can be written again: transformers reads some that it refuses to write."""

    __slots__ = ("text",)  # no part of the configuration, which is the object's __dict__

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """Write the file as transformers would, or unchanged if transformers refuses."""
        try:
            super().save_pretrained(save_directory, *args, **options)
        except ValueError:  # such as a temperature beside do_sample: false, in files of well-known models
            Path(save_directory, GENERATION_FILE).write_bytes(self.text)


def load_generation_config(folder: str) -> StoredGenerationConfig | None:
    """Return a folder's generation_config.json; None if it has none."""
    path = Path(folder, GENERATION_FILE)
    if not path.exists():
        return None
    try:
        found = StoredGenerationConfig.from_pretrained(folder)
        found.text = path.read_bytes()
        return found
    except Exception as error:  # OSError, ValueError, ...: depends on what is broken
        raise ModelError(f"{folder}: no generation_config.json that transformers can use: {one_line(error)}") from error


def decoder_layers(model: PreTrainedModel) -> ModuleList:
    """Return the decoder layers: the first ModuleList whose length is the config's num_hidden_layers."""
    wanted = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, ModuleList) and len(module) == wanted:
            return module
    raise ModelError(
        f"{type(model).__name__}: found no ModuleList of {wanted} decoder layers to shard; "
        "add its layout to ludic.models.weight_files.decoder_layers"
    )
