"""Find out how a trainer of TRL samples, and which logprobs are those of the distribution that it samples from.

TRL divides the logits of its own forward passes by the temperature, and applies no other setting of sampling to them.
Dropout and NEFTune's noise, if they are on, make two passes of the same weights differ.
"""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ludic.adapters.sampling import REGEX, changes_distribution
from ludic.adapters.trl_rows import Sampling

COLUMNS = ("temperature", "top_p", "top_k")
"""Settings of sampling that have columns; others that change the distribution are metadata of the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captures:
    """How a trainer samples, and which logprobs are kept: those of the distribution that was sampled from."""

    sampling: Sampling
    train_logprobs: bool
    """Whether those of a forward pass in training are."""
    eval_logprobs: bool
    """Whether those of a forward pass in an evaluation are."""
    sampler_logprobs: bool
    """Whether the sampler's own are."""
    has_sampler: bool
    """Whether there are any of the sampler's own."""


def captures_of(trainer: Any, *, is_processed: bool) -> Captures:
    """Return what is true of a trainer now. is_processed: `has_processed_logprobs`, which only rank 0 knows."""
    settings = _vllm_settings(trainer) if trainer.use_vllm else _transformers_settings(trainer)
    changed = sorted(name for name, value in settings.items() if changes_distribution(name, value))
    if settings["temperature"] != trainer.temperature:  # set in generation_kwargs, of which TRL's passes know nothing
        changed.append("temperature")
    is_own = getattr(trainer, "rollout_func", None) is not None
    is_random = bool(trainer.args.neftune_noise_alpha) or _has_dropout(trainer.model)
    return Captures(
        sampling=Sampling(
            columns={
                "temperature": float(settings["temperature"]),
                "top_p": 1.0 if settings["top_p"] is None else float(settings["top_p"]),
                "top_k": max(settings["top_k"] or 0, 0) or None,
                "max_tokens": trainer.max_completion_length,
                "engine": _engine(trainer),
            },
            metadata={name: str(settings[name]) for name in changed if name not in COLUMNS},
            stop_tokens=frozenset([*trainer.eos_token_ids, trainer._tokenizer.pad_token_id]),
        ),
        train_logprobs=not changed and not is_own and not is_random,
        eval_logprobs=not changed and not is_own,
        sampler_logprobs=is_own or is_processed or (not changed and settings["temperature"] == 1),
        has_sampler=is_own or trainer.use_vllm,
    )


def _transformers_settings(trainer: Any) -> dict[str, Any]:
    """Return the settings of generation as transformers completes them: what TRL leaves out is the model's own."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    config, _ = model._prepare_generation_config(trainer.generation_config)
    return dict(config.to_dict())


def _vllm_settings(trainer: Any) -> dict[str, Any]:
    names = (*COLUMNS, "min_p", "repetition_penalty")
    own = {**{name: getattr(trainer, name) for name in names}, REGEX: trainer.args.vllm_structured_outputs_regex}
    return {**own, **(trainer.args.generation_kwargs or {})}


def has_processed_logprobs(trainer: Any) -> bool:
    """Return whether vLLM's logprobs are those after temperature and cuts; TRL's own engine is started so."""
    if not trainer.use_vllm or trainer.vllm_mode != "server":
        return True
    settings = trainer.vllm_generation.vllm_client.get_server_info()
    return bool(settings["model_config"]["logprobs_mode"] == "processed_logprobs")


def _has_dropout(model: torch.nn.Module) -> bool:
    """Return whether a pass in training draws random numbers: then two passes of the same weights differ."""
    return any(
        isinstance(value, float)
        and value > 0
        and ("drop" in name or "jitter" in name or (name == "p" and "Drop" in type(module).__name__))
        for module in model.modules()
        for name, value in vars(module).items()
    )


def _engine(trainer: Any) -> str | None:
    if getattr(trainer, "rollout_func", None) is not None:
        return None
    name = "vllm" if trainer.use_vllm else "transformers"
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:  # a server of vLLM elsewhere
        return name
