"""How rows of other trainers were sampled, as their engines were told, by the names of transformers and vLLM. Pure."""

from collections.abc import Mapping
from typing import Any

REGEX = "structured_outputs_regex"
"""Name of vLLM's structured outputs by a regular expression."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_k": (0, -1),
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("top_p", "typical_p", "repetition_penalty", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("guidance_scale", "num_beams", "num_return_sequences"), (1,)),
    **dict.fromkeys(("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"), ()),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("watermarking_config", "penalty_alpha", "constraints", "top_h"), ()),
    # Of vLLM alone.
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_tokens"), (0,)),
    **dict.fromkeys(("logit_bias", "bad_words", "allowed_token_ids", "structured_outputs", REGEX), ()),
    "remove_invalid_values": (False,),
    "do_sample": (True,),
}
"""Settings of generation with the values, besides None, that leave the model's own distribution unchanged."""


def changes_distribution(name: str, value: Any) -> bool:
    """Return whether a setting of generation, besides temperature, changes the distribution that is sampled from."""
    return name in _NEUTRAL and value not in (None, [], {}, *_NEUTRAL[name])


def sampled_with(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns of a row from parameters by vLLM's names; None, the run's own, for one that is not given.

    vLLM's top_k is off below 1.
    """
    top_k = given.get("top_k")
    columns = {name: None if given.get(name) is None else float(given[name]) for name in ("temperature", "top_p")}
    return columns | {"top_k": top_k if top_k is not None and top_k > 0 else None}


def is_of_the_model(given: Mapping[str, Any]) -> bool:
    """Return whether these parameters sample from the model's own distribution, changed in no way."""
    return given.get("temperature") in (None, 1) and not any(map(changes_distribution, given, given.values()))
