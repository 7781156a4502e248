"""Methods that ludic adds to vLLM's workers; vLLM imports this in its own processes (worker_extension_cls).

There, the import also starts a thread that ends vLLM with the process that started it: the scheduler of vLLM 0.32 goes
on if that process is killed, and keeps its memory.
"""

import contextlib
import os
import select
import signal
import threading
from typing import Any

OWNER = "LUDIC_VLLM_OWNER"
"""Environment variable: process id of the ludic that starts vLLM."""


class WorkerExtension:
    """Mixed into vLLM's worker class; call its methods by collective_rpc."""

    reload_weights: Any
    get_model: Any

    def ludic_reload_weights(self, weights_path: str) -> None:
        """Replace the weights by those of a Hugging Face folder. weights_path: absolute.

        vLLM 0.32's reload_weights keeps the old head of a model with tied embeddings on the CPU: there the head
        computes with a packed copy of the weights, which only its own loading packs again.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        self.reload_weights(weights_path=weights_path)
        for module in self.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


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
