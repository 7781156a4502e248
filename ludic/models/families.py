"""Check on a small random model whether ludic computes a model family as transformers does.

A way of running a model, such as packed sequences, is tried on a small model of the same configuration before a large
one is loaded: its logprobs must equal those of transformers' plain attention on each sequence alone. So no list of
families is needed, also when a release of transformers changes one. A check takes about a second; its verdict is cached
in the user's cache folder, under a digest of the small configuration, the versions of torch and transformers, and
ludic's own code. Raises ModelError, which names the family and what is wrong.
"""

import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.functional import softmax
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations import hub_kernels

from ludic.base import Longrope, cache_folder
from ludic.errors import ModelError, one_line
from ludic.models.rope import check_rope, max_positions, original_length
from ludic.models.weight_files import load_config, make_config, make_model

logger = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Nats; float32 rounds exact families to some 1e-6."""
SEQUENCE_LENGTHS = (5, 23, 1, 14, 6, 4, 70)
"""Lengths of the sequences of a probe in tokens, without the first token: below, at and above WINDOW, one without a
predecessor, and one beyond chunks of 64 tokens, a size that configurations do not name."""
NUM_TOKENS = 100
"""Ids below this are plain tokens of every small model; a model that is loaded may know fewer."""

_MOST_PARAMETERS = 30_000_000
"""Maximum parameters of a small model: a larger one has sizes that `shrink` does not know, and would take seconds."""
_CODE = ("models", "training", "engines")
"""Folders of ludic whose code a verdict depends on."""

TokensWithLogprobs = Sequence[tuple[np.ndarray, Sequence[float] | Tensor]]
"""Sequences of token ids, each with the logprobs of its last tokens."""
SampleWithModel = Callable[[PreTrainedModel], TokensWithLogprobs]
"""A way of running a model on sequences of plain tokens."""


@contextmanager
def without_kernels() -> Iterator[None]:
    """Run layers on the CPU also where their kernels for CUDA are installed (fla, causal-conv1d, mamba-ssm).

    transformers gives them every tensor, wherever it is, unless a model is being exported.
    """
    name = "is_torchdynamo_exporting"
    asked = getattr(hub_kernels, name, None)
    if asked is None:
        yield
        return
    setattr(hub_kernels, name, lambda: True)
    try:
        yield
    finally:
        setattr(hub_kernels, name, asked)


def check_family(folder: str, where: str, run: SampleWithModel, *, attention: str | None, what: str) -> bool:
    """Raise ModelError if `run` gives other logprobs than transformers for models of a folder's config.json.

    Returns False if no small model could be made and checked; then `check_model` can check the loaded one. where: the
    model's name in errors. attention: attn_implementation of the model that is passed to `run`; None is transformers'
    choice. what: beginning of the error's reason, such as "packed sequences".
    """
    try:
        config = load_config(folder)
    except ModelError:
        return True  # loading the model reports the error
    check_rope(config, where)
    try:
        small = shrink(config)
    except Exception as error:  # each configuration class checks its values differently
        logger.debug("%s: no small %s could be made: %s", where, config.model_type, one_line(error))
        return False
    file = _verdict_file(small, attention, what)
    verdict = _read(file)
    if verdict is None:
        verdict = {"problem": None, "is_known": True}
        try:
            verdict["problem"] = _problem_with_any_factors(small, run, attention)
        except _UnknownError as error:
            logger.debug("%s: no small %s could be run: %s", where, config.model_type, error)
            verdict["is_known"] = False
        _keep(file, verdict)
    if verdict["problem"]:
        raise _refusal(config, where, what, f"in a small random model of this configuration, {verdict['problem']}")
    return bool(verdict["is_known"])


def check_model(model: PreTrainedModel, where: str, run: SampleWithModel, *, what: str) -> None:
    """Raise ModelError if `run` gives other logprobs than this model, with its own weights and dtype, by itself."""
    tolerance = max(TOLERANCE, 16 * torch.finfo(model.dtype).eps)
    attention = model.config._attn_implementation

    def alone(tokens: np.ndarray) -> Tensor:
        model.set_attn_implementation("eager")
        return logprobs_alone(model, tokens)

    with torch.no_grad(), without_kernels():
        try:
            problem = _difference(model, run, alone, tolerance)
        finally:
            model.set_attn_implementation(attention)
    if problem:
        raise _refusal(model.config, where, what, problem)


def _refusal(config: PreTrainedConfig, where: str, what: str, problem: str) -> ModelError:
    return ModelError(f"{where}: ludic does not know how to run {config.model_type} models with {what}: {problem}")


class _UnknownError(Exception):
    """The small model does not run even without packing, so it proves nothing."""


def _problem_with_any_factors(small: PreTrainedConfig, run: SampleWithModel, attention: str | None) -> str | None:
    """Return `_problem` with the short or the long factors of a longrope model, whichever has one."""
    choices: Sequence[Longrope] = ("short",) if original_length(small) is None else ("short", "long")
    found = (_problem(small, run, attention, longrope) for longrope in choices)
    return next((problem for problem in found if problem), None)


def _problem(small: PreTrainedConfig, run: SampleWithModel, attention: str | None, longrope: Longrope) -> str | None:
    """Return what is wrong with a way of running a small model, None if nothing is. Raises _UnknownError.

    Repeated layers amplify rounding: a result that is wrong in float32 but right in float64 counts as right.
    """
    problem = None
    for dtype in (torch.float32, torch.float64):
        with torch.random.fork_rng(devices=[]), torch.no_grad(), _WholeSoftmax(), without_kernels():
            torch.manual_seed(0)
            try:
                plain = _small_model(small, dtype, longrope)
            except _UnknownError:
                if problem is None:
                    raise
                return problem  # some layers do not run in float64
            try:
                model = _make(small, dtype, attention, longrope)
                model.eval().load_state_dict(plain.state_dict())
            except Exception as error:
                return f"{type(error).__name__}: {one_line(error)}"
            found = _difference(model, run, partial(logprobs_alone, plain), TOLERANCE)
        if found is None:
            return None
        problem = problem or found
    return problem


class _WholeSoftmax(TorchFunctionMode):
    """Keeps softmaxes of float64 in float64.

    Families that ask for float32 would turn a mask's numbers, the least of float64, into minus infinity, and a row of
    padding into NaN.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is softmax and args and args[0].dtype == torch.float64:
            options.pop("dtype", None)
        return func(*args, **options)


def _small_model(small: PreTrainedConfig, dtype: torch.dtype, longrope: Longrope) -> PreTrainedModel:
    """Return a model with large random weights that runs. Raises _UnknownError."""
    # Eager attention implements everything that a family's authors wrote, such as caps and sinks.
    try:
        with torch.device("meta"):
            size = _make(small, dtype, "eager", longrope).num_parameters()
        if size > _MOST_PARAMETERS:
            raise _UnknownError(f"it has {size:,} parameters")
        model = _make(small, dtype, "eager", longrope).eval()
        spread(model)
        alone = [logprobs_alone(model, tokens) for tokens in probe_sequences(model)]
    except Exception as error:
        raise _UnknownError(one_line(error)) from error
    if not all(logprobs.isfinite().all() for logprobs in alone):
        raise _UnknownError("its logprobs are not finite")
    return model


def _make(
    small: PreTrainedConfig, dtype: torch.dtype, attention: str | None, longrope: Longrope | None
) -> PreTrainedModel:
    # The grouped products of experts do not run in float64.
    experts = "eager" if dtype == torch.float64 else None
    return make_model(small, dtype=dtype, attention=attention, experts=experts, longrope=longrope)


def _difference(
    model: PreTrainedModel, run: SampleWithModel, alone: Callable[[np.ndarray], Tensor], tolerance: float
) -> str | None:
    try:
        found = run(model)
    except ModelError as error:
        return str(error)
    except Exception as error:  # missing parts of a model show as AttributeError, TypeError, KeyError, ...
        return f"{type(error).__name__}: {one_line(error)}"
    largest = 0.0
    for tokens, logprobs in found:
        given = torch.as_tensor(logprobs, dtype=torch.float64)
        if not len(given):
            return f"a sequence of {len(tokens)} tokens was not run"
        wanted = alone(tokens)[len(tokens) - 1 - len(given) :].double()
        # A logprob that is not finite differs from every number.
        largest = max(largest, (given - wanted).abs().nan_to_num(torch.inf).max().item())
    if largest <= tolerance:
        return None
    return f"logprobs differ by up to {largest:.2g} nats from those of each sequence alone (wanted {tolerance:.0e})"


def logprobs_alone(model: PreTrainedModel, tokens: np.ndarray) -> Tensor:
    """Return the logprobs of all tokens but the first, (length - 1,), without cache, mask or neighbours."""
    ids = torch.tensor(tokens, dtype=torch.int64, device=model.device)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return logprobs.gather(-1, ids[1:, None])[:, 0]


def spread(model: PreTrainedModel) -> None:
    """Make every parameter matter: initial weights hide errors, for example in sinks that begin at 0 and in caps of
    scores."""
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        if parameter.ndim < 2:
            parameter.add_(noise, alpha=0.5)
        else:
            parameter.copy_(2 * noise / parameter.shape[-1] ** 0.5)


def probe_sequences(model: PreTrainedModel) -> list[np.ndarray]:
    """Return the sequences of a probe, each (length + 1,) int32 plain tokens that the model knows."""
    numbers = np.random.default_rng(0)
    most = min(NUM_TOKENS, len(model.get_input_embeddings().weight))
    longest = max_positions(model.config, "long")
    lengths = [max(2, min(length + 1, longest)) for length in SEQUENCE_LENGTHS]
    return [numbers.integers(min(3, most - 1), most, length, dtype=np.int32) for length in lengths]


def _verdict_file(small: PreTrainedConfig, attention: str | None, what: str) -> Path:
    versions = [transformers.__version__, torch.__version__, _code_digest()]
    known = json.dumps(
        [small.to_dict(), type(small).__module__, attention, what, versions], sort_keys=True, default=str
    )
    return cache_folder() / "families" / f"{small.model_type}-{hashlib.sha256(known.encode()).hexdigest()[:16]}.json"


@cache
def _code_digest() -> str:
    package = Path(__file__).parents[1]
    files = sorted(file for folder in _CODE for file in (package / folder).glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _read(file: Path) -> dict[str, str | bool | None] | None:
    """Return a cached verdict; None if there is no usable one."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        verdict = json.loads(file.read_bytes())
        if isinstance(verdict["is_known"], bool) and isinstance(verdict["problem"], str | None):
            return verdict
    return None


def _keep(file: Path, verdict: dict[str, str | bool | None]) -> None:
    """Cache a verdict; without a writable folder, the next process checks again."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as new:
            json.dump(verdict, new)
        Path(new.name).replace(file)


# --- Small configurations ------------------------------------------------------------------------------
# Make a small configuration: a few small layers, one of each kind, with the same computations as the large ones. Only
# sizes are changed, recognized by their names; scales, presence of windows, kinds of layers and positions, and every
# switch stay. Each length at which a model may compute differently becomes one that sequences of a probe cross. Raises
# the errors of transformers for a configuration that it refuses.

VOCAB_SIZE = 128
WINDOW = 6
"""Maximum tokens of a window, a chunk, a block or the original context of a small model."""

_HEADS, _HEAD, _HIDDEN, _EXPERTS = 4, 16, 64, 4
_FIRST_SPECIAL = 120
"""Ids from here on are those of special tokens, such as the end of a sequence or an image."""
_MOST_KINDS = 4
_DROPPED = ("architectures", "auto_map", "dtype", "id2label", "label2id", "quantization_config", "transformers_version")

_LONGEST_NAME = 100
"""Maximum characters of a configuration's name that is matched: the patterns below are slow for longer ones."""
_LAYERS = re.compile(r"(num_)?(hidden|encoder|decoder)_layers|n_layers?|num_layers|depth|num_layers_per_stack")
_HEAD_COUNTS = re.compile(r"(\w+_)?(num|n)_(\w*_)?heads?|(encoder|decoder)_attention_heads|attention_heads")
_KEY_HEADS = re.compile(r"(\w+_)?num_(key_value|kv)_heads|n_head_kv|num_query_groups")
_HIDDENS = re.compile(
    r"hidden_size|d_model|n_embd|dim|emb(edding)?_dim|(\w+_)?embedding_size|word_embed_proj_dim|lru_width"
)
_VOCABULARIES = re.compile(r"(\w+_)?vocab(_size(_\w+)?)?")
_WIDTHS: Mapping[re.Pattern[str], int] = {
    re.compile(pattern): most
    for pattern, most in {
        r"(\w+_)?head_dim|attention_head_size|dim_head|kv_channels|d_head|mamba_d_head": _HEAD,
        r"rotary_dim": _HEAD // 2,
        r"(\w+_)?(intermediate|feed_forward|ffn|ffn_hidden|mlp)_(size|dim)(_\w+)?|n_inner|dff|dim_ff|d_ff|d_inner": 48,
        r"(\w+_)?lora_rank|laurel_rank|(\w+_)?lowrank|d_rel": 24,
        r"hidden_size_per_layer_input": 16,
    }.items()
}
_AT_MOST: Mapping[re.Pattern[str], int] = {
    re.compile(pattern): most
    for pattern, most in {
        r"(num|n)_(routed_|local_)?experts|moe_num_experts": _EXPERTS,
        r"num_experts_per_tok(en)?|top_k\w*|moe_top_?k|moe_k": 2,
        r"n_group": 2,
        r"topk_group": 1,
        r"vocab_offset": VOCAB_SIZE,
        r"max_position_embeddings|n_positions|n_ctx|max_seq_len": 4096,
        r"index_topk|floor_scale|local_attention|mem_len": WINDOW,
        r"(compressed_sparse|heavily_compressed)_attention": WINDOW,
        r"index_topk_blocks": 1,
        r"first_k_dense_replace|num_dense_layers|max_window_layers|moe_layer_start_index": 1,
        r"\w+_(period|interval|pattern|freq)|\w+_every_n_layers|decoder_sparse_step": 2,
        r"\w+_(layer_)?offset": 1,
    }.items()
}
_LENGTHS = re.compile(r"\w*(window|chunk|length|position_embeddings|ctx|context|seq_?len|block_size)(_\w+)?")
"""Lengths, for names that no earlier rule matches."""
NO_LIMITS: Mapping[re.Pattern[str], str] = {
    re.compile(pattern): reason
    for pattern, reason in {
        r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions": "no sequence is longer",
        r"model_max_length|context_length|max_inference_chunksize": "no sequence is longer",
        r"num_position_embeddings|image_seq_length|\w+_per_image|conf_\w+|left_chunk|mask_\w+_length": "image or sound",
        r"prompt_length": "tokens that the model itself puts before a prompt",
        r"max_window_layers|\w*window_pattern|\w+_chunks_before": "layers or chunks, not tokens",
    }.items()
}
"""Names of lengths that do not change how a decoder computes, with the reason."""


def shrink(config: PreTrainedConfig, *, scale: int = 1) -> PreTrainedConfig:
    """Return a small configuration of the same family; parts for images or sound shrink like the decoder.

    scale: factor of all widths. vLLM for CPUs needs heads of 32 numbers, and experts of a multiple of 32.
    """
    return make_config(_shrunk(config.to_dict(), scale))


def _shrunk(values: Mapping[str, Any], scale: int) -> dict[str, Any]:
    kept = {
        name: value
        for name, value in values.items()
        if name not in _DROPPED and not name.startswith("_name") and len(name) <= _LONGEST_NAME
    }
    depth = next((value for name, value in kept.items() if _is_size(value) and _LAYERS.fullmatch(name)), None)
    layers = _layers_of_each_kind(kept, depth)
    heads = next((value for name, value in kept.items() if _is_size(value) and _HEAD_COUNTS.fullmatch(name)), _HEADS)
    small = {name: _part(name, value, kept, depth, layers, heads, scale) for name, value in kept.items()}
    if "head_dim" in small and small["head_dim"] is None and _is_size(small.get("hidden_size")):
        small["head_dim"] = small["hidden_size"] // min(heads, _HEADS)
    if _is_size(small.get("mamba_d_ssm")):
        small["mamba_d_ssm"] = small["mamba_n_heads"] * small["mamba_d_head"]
    if {"expand", "num_heads", "head_dim"} <= small.keys():  # Mamba 2, whose heads are as wide as its states
        small["head_dim"] = small["expand"] * small["hidden_size"] // small["num_heads"]
    return small


def _part(
    name: str, value: Any, values: Mapping[str, Any], depth: int | None, layers: list[int], heads: int, scale: int
) -> Any:
    """Return the small value of one entry. layers: the kept ones of `depth`. heads: the former number of attention
    heads."""
    if isinstance(value, dict) and depth is not None and value and all(str(key).isdigit() for key in value):
        by_layer = {int(key): _shrunk(part, scale) if isinstance(part, dict) else part for key, part in value.items()}
        return {new: by_layer[old] for new, old in enumerate(layers) if old in by_layer}
    if isinstance(value, dict):
        is_rope = "rope_type" in value or "rope" in name
        return _shrunk_rope(value, values, scale) if is_rope else _shrunk(value, scale)
    if isinstance(value, list) and depth is not None and len(value) == depth:
        return [value[layer] for layer in layers]
    if _names_layers(name, value):
        return [new for new, old in enumerate(layers) if old in value]
    if re.fullmatch(r"\w+_token_(id|index)", name):
        return _special(value)
    if not _is_size(value):
        return value
    if _VOCABULARIES.fullmatch(name):
        return VOCAB_SIZE  # also of a smaller one, so that the probe's tokens and special ids are in it
    if name == "qk_head_dim" and "qk_rope_head_dim" in values:
        return sum(min(scale * _HEAD, values[part]) for part in ("qk_nope_head_dim", "qk_rope_head_dim"))
    if name.startswith("mamba_") and _HEAD_COUNTS.fullmatch(name):
        return min(value, 2 * _HEADS)  # heads of a state are twice as wide in all as the hidden states
    if _LAYERS.fullmatch(name):
        return min(value, len(layers))
    if _KEY_HEADS.fullmatch(name):
        return 1 if value == 1 else min(heads, _HEADS) if value >= heads else max(1, min(heads, _HEADS) // 2)
    if _HEAD_COUNTS.fullmatch(name):
        return min(value, _HEADS)
    if _HIDDENS.fullmatch(name):
        return value if value <= scale * _HIDDEN and heads <= _HEADS else min(heads, _HEADS) * scale * _HEAD
    if name.startswith("num_") and name.endswith("_layers") and depth:
        return round(value * len(layers) / depth)
    if (width := _most(name, _WIDTHS)) is not None:
        return min(value, scale * width)
    most = _most(name, _AT_MOST)
    if most is None and _LENGTHS.fullmatch(name) and not any(each.fullmatch(name) for each in NO_LIMITS):
        most = WINDOW
    return value if most is None else min(value, most)


def _most(name: str, limits: Mapping[re.Pattern[str], int]) -> int | None:
    return next((most for pattern, most in limits.items() if pattern.fullmatch(name)), None)


def _layers_of_each_kind(values: Mapping[str, Any], depth: int | None) -> list[int]:
    """Return the first layer of each kind, twice: a later layer depends on the output of an earlier one."""
    if depth is None:
        return [0, 0]
    lists = [value for value in values.values() if isinstance(value, list) and len(value) == depth]
    lists += [
        [layer in value for layer in range(depth)] for name, value in values.items() if _names_layers(name, value)
    ]
    tables = [value for value in values.values() if isinstance(value, dict)]
    kinds = {
        str(
            [entries[layer] for entries in lists] + [table.get(layer, table.get(str(layer))) for table in tables]
        ): layer
        for layer in reversed(range(depth))
    }
    first = sorted(kinds.values())[:_MOST_KINDS]
    return first + first


def _names_layers(name: str, value: Any) -> bool:
    """Return whether an entry lists the numbers of some layers."""
    return isinstance(value, list) and name.endswith("layer_indices")


def _shrunk_rope(rope: Mapping[str, Any], values: Mapping[str, Any], scale: int) -> dict[str, Any]:
    """Return the settings of rotary positions: lists have an entry for each pair of a head's numbers."""
    head = values.get("head_dim") or values.get("hidden_size", _HIDDEN) // values.get("num_attention_heads", _HEADS)
    share = min(1.0, scale * _HEAD / head)

    def fit(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _shrunk_rope(value, values, scale)
        if name == "original_max_position_embeddings" and _is_size(value):
            return min(value, WINDOW)
        if name.endswith("_factor") and isinstance(value, list):
            return value[: max(1, round(len(value) * share))]
        return [max(1, round(part * share)) for part in value] if name == "mrope_section" else value

    return {name: fit(name, value) for name, value in rope.items()}


def _special(value: Any) -> Any:
    if isinstance(value, list):
        return [_special(part) for part in value]
    return value if not _is_size(value) or value < 3 else _FIRST_SPECIAL + value % (VOCAB_SIZE - _FIRST_SPECIAL)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
