"""Former location of ludic.adapters.judge, which users' environments and their copies in roots still import."""

from typing import Any

from ludic.base import find_by_name


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return find_by_name(f"ludic.adapters.judge:{name}")
