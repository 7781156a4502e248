"""Labels of the weights on a vLLM server, by which workers agree on them. Pure.

vLLM keeps one text beside its weights (/weight_info, /update_weight_version) and repeats it with each answer's tokens.
ludic writes

    RUN:VERSION                       the weights of this version of this run
    RUN:VERSION <- VERSION by NAME    the same weights, before the arrow, while NAME loads another version

Any other text means unknown weights: those that the server started with, or half-loaded ones.
"""

import re
from dataclasses import dataclass

HALF_LOADED = "half loaded"
"""Label of weights of which a part may be replaced."""

_LABEL = re.compile(r"([\w-]+):(\d+)( <- .*)?")


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights that ludic has loaded."""

    run: str
    """Id of a run: letters, digits, _ and -."""
    version: int

    @property
    def label(self) -> str:
        return f"{self.run}:{self.version}"


def weights_of(label: str) -> Weights | None:
    """Return the weights that a label names; None if they are unknown."""
    match = _LABEL.fullmatch(label)
    return Weights(match[1], int(match[2])) if match else None


def is_claim(label: str) -> bool:
    """Return whether somebody says that he is loading other weights."""
    return " <- " in label


def claim(label: str, version: int, name: str) -> str:
    """Return a label that claims the loading of a version. label: that of the weights in use, or an earlier claim."""
    return f"{label.partition(' <- ')[0]} <- {version} by {name}"
