"""LoRA adapters as vLLM applies them: one name and number for each version.

Reads peft's adapter_config.json and the header of adapter_model.safetensors. Raises ModelError, which names the folder.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ludic.errors import ModelError, one_line
from ludic.models.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ludic.models.weight_files import read_shapes

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's max_lora_rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA folder."""

    folder: str
    version: int
    """Version of the policy."""
    rank: int
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each tensor, by name."""

    @property
    def max_rank(self) -> int:
        """The lowest max_lora_rank that holds the adapter."""
        fitting = [rank for rank in _RANKS if rank >= self.rank]
        if not fitting:
            raise ModelError(f"{self.folder}: the LoRA adapter has rank {self.rank}, vLLM holds at most {_RANKS[-1]}")
        return fitting[0]

    def request(self) -> "LoRARequest":
        """Return vLLM's name of the adapter."""
        from vllm.lora.request import LoRARequest

        # Numbers of adapters begin at 1, versions at 0.
        return LoRARequest(f"version-{self.version}", self.version + 1, self.folder)

    def check_like(self, other: "Adapter") -> None:
        """Raise ModelError unless this adapter has the tensors of another one."""
        names = sorted(
            name for name in self.shapes.keys() | other.shapes.keys() if self.shapes.get(name) != other.shapes.get(name)
        )
        if names:
            raise ModelError(
                f"{self.folder}: the LoRA adapter has other tensors than version {other.version}; "
                f"the first of {len(names)}: {names[0]}"
            )


def open_adapter(folder: str, version: int) -> Adapter:
    """Return the adapter of a LoRA folder, whose files are complete."""
    path = Path(folder).absolute()
    try:
        rank = int(json.loads((path / ADAPTER_CONFIG).read_text())["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder}: {ADAPTER_CONFIG} gives no rank: {one_line(error)}") from error
    return Adapter(folder=str(path), version=version, rank=rank, shapes=read_shapes(path / ADAPTER_WEIGHTS))
