"""Define the settings of a worker's inference engine; imports nothing slow, to keep `--help` fast."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from ludic.base import ENGINE, is_installed, visible_gpus
from ludic.settings import GpuMemory, MaxBatch, Role, TensorParallel
from ludic.settings.table import check

VLLM = "vllm"
"""Name of the engine that samples with vLLM in the worker's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the inference engine of one worker, or of all workers that `ludic run` starts."""

    engine: Annotated[str, Role(first_page=True)] = ENGINE
    """Inference engine: transformers, vllm (in the worker's process), server (vLLM servers elsewhere), or
    path/to/file.py:ClassName of your own. auto is vllm on a GPU where it is installed, else transformers."""
    max_batch: MaxBatch = 256
    """Maximum number of sequences that the engine decodes together; further requests wait."""
    tensor_parallel: TensorParallel = 1
    """Number of GPUs that hold one copy of the model. Only for vllm."""
    gpu_memory: GpuMemory | None = None
    """Share of a GPU's memory that the engine may take, from 0 to 1. None is 0.9, or less if the trainer uses the same
    GPU. Only for vllm."""
    server_url: tuple[str, ...] = ()
    """URLs of the servers to sample from, such as http://node1:8000. Only for server."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """More options of the engine as JSON, such as {"max_model_len": 8192}; for vllm, arguments of AsyncEngineArgs."""

    def __post_init__(self) -> None:
        check(self)

    def chosen(self, device: str | None = None) -> str:
        """Return the engine's name, with one of this machine for auto. device: "cpu" or "cuda"; None takes a GPU."""
        if self.engine != ENGINE:
            return self.engine
        return VLLM if device != "cpu" and is_installed("vllm") and visible_gpus() else "transformers"

    @property
    def is_vllm(self) -> bool:
        """True if the engine is vLLM in a worker's process, which takes whole GPUs and reserves memory at its start."""
        return self.chosen() == VLLM
