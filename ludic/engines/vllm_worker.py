"""Extend vLLM's workers with ludic's methods; vLLM imports this module in its own processes (worker_extension_cls).

The import also starts a thread that ends vLLM with the process that started it: otherwise the scheduler of vLLM 0.32
continues when that process is killed, and keeps its memory.
"""

import contextlib
import logging
import os
import select
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import Any

OWNER = "LUDIC_VLLM_OWNER"
"""Environment variable: process id of the ludic that starts vLLM."""


class WorkerExtension:
    """Mixed into vLLM's worker class; call its methods by collective_rpc."""

    reload_weights: Any
    get_model: Any

    def ludic_reload_weights(self, weights_path: str) -> None:
        """Replace the weights by those of a Hugging Face folder. weights_path: absolute.

        On the CPU, heads and experts compute with packed weights. vLLM 0.32's reload_weights keeps the old packed head
        of a model with tied embeddings, and puts new experts unpacked where packed ones were.
        Raises RuntimeError if layers keep their old weights, which vLLM only logs.
        """
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.platforms import current_platform

        model = self.get_model()
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if current_platform.is_cpu() and isinstance(method, UnquantizedFusedMoEMethod):
                method.moe_kernel = None  # without one, it packs the weights that it loads
        with _all_replaced(model), _readable_weights(model):
            self.reload_weights(weights_path=weights_path)
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


@contextlib.contextmanager
def _all_replaced(model: Any) -> Iterator[None]:
    """Raise RuntimeError if vLLM logs meanwhile that layers got no weights, and so keep their old ones."""
    log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    kept: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        if record.msg == "%s: Failed to load weights":
            kept.append(str(record.args[0]))  # type: ignore[index]
        return record.levelno >= level

    level = log.getEffectiveLevel()
    log.setLevel(logging.WARNING)
    log.addFilter(note)
    try:
        yield
    finally:
        log.removeFilter(note)
        log.setLevel(level)
    with_weights = {type(module).__name__ for module in model.modules() if list(module.parameters(recurse=False))}
    if names := sorted(with_weights.intersection(kept) - _HANDLED_HERE):
        raise RuntimeError(f"vLLM does not replace the weights of {', '.join(names)}")


_HANDLED_HERE = {"OAIAttention", "ParallelLMHead"}
"""Layers of vLLM whose weights ludic replaces: gpt-oss's attention has sinks, and tied heads are packed again."""


@contextlib.contextmanager
def _readable_weights(model: Any) -> Iterator[None]:
    """Let vLLM 0.32 replace all weights of gpt-oss: it loses stacked experts and sinks, but takes single experts."""
    if type(model).__name__ != "GptOssForCausalLM":
        yield
        return
    from vllm.distributed import get_tensor_model_parallel_rank

    sinks = {}

    def single(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for name, tensor in weights:
            if name.endswith(".sinks"):
                sinks[name.replace(".self_attn.", ".attn.")] = tensor
            if name.endswith(_STACKED):
                for number, expert in enumerate(tensor):
                    yield name.replace(".experts.", f".experts.{number}."), expert
            else:
                yield name, tensor

    load = model.load_weights
    model.load_weights = lambda weights: load(single(weights))
    try:
        yield
    finally:
        del model.load_weights
    for name, tensor in sinks.items():
        own = model.get_parameter(name).data
        own.copy_(tensor.narrow(0, get_tensor_model_parallel_rank() * len(own), len(own)))


_STACKED = tuple(f".experts.{name}{kind}" for name in ("gate_up_proj", "down_proj") for kind in ("", "_bias"))


def _end_with(owner: int) -> None:
    """Wait until a process ends; then end this one, and the scheduler if it is this one's parent."""
    scheduler = os.getppid()
    with contextlib.suppress(ProcessLookupError):  # ended already
        select.select([os.pidfd_open(owner)], [], [])
    if scheduler not in (owner, 1):
        os.kill(scheduler, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _watch_owner() -> None:
    owner = int(os.environ.get(OWNER) or os.getpid())
    if owner != os.getpid() and hasattr(os, "pidfd_open"):  # Linux
        threading.Thread(target=_end_with, args=(owner,), name="ludic-owner", daemon=True).start()


_watch_owner()
