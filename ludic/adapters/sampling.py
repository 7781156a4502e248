"""How rows of other trainers were sampled, as their engines were told. Pure."""

from collections.abc import Mapping
from typing import Any


def sampled_with(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns of a row from parameters by vLLM's names; None, the run's own, for one that is not given.

    vLLM's top_k is off below 1.
    """
    top_k = given.get("top_k")
    columns = {name: None if given.get(name) is None else float(given[name]) for name in ("temperature", "top_p")}
    return columns | {"top_k": top_k if top_k is not None and top_k > 0 else None}


def is_of_the_model(given: Mapping[str, Any]) -> bool:
    """Return whether parameters by vLLM's names sample from the model's own distribution, changed in no way."""
    top_k, off = given.get("top_k"), {"temperature": 1, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    return (top_k is None or top_k <= 0) and all(given.get(name) in (None, value) for name, value in off.items())
