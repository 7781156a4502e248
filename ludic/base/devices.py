"""Find the GPUs that a process may use, without importing torch if there are none."""

import os
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"
MEMORY_VARIABLE = "LUDIC_TRAINER_GPU_MEMORY"
"""Share of a GPU's memory that the trainer may take, from 0 to 1, where workers use it, too."""
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Devices of the drivers: NVIDIA on Linux, NVIDIA in WSL, AMD."""

Gpus = tuple[str, ...]
"""Names of GPUs as CUDA_VISIBLE_DEVICES has them: numbers or UUIDs."""


def visible_gpus() -> Gpus:
    """Return the GPUs that this process may use; those of CUDA_VISIBLE_DEVICES if it is set."""
    if (names := parse_gpus(os.environ.get(VARIABLE))) is not None:
        return names[: names.index("-1")] if "-1" in names else names  # CUDA ignores what follows an invalid number
    if not any(Path(device).exists() for device in _DRIVERS):  # importing torch takes seconds
        return ()
    import torch

    return tuple(str(number) for number in range(torch.cuda.device_count()))


def parse_gpus(text: str | None) -> Gpus | None:
    """Return the names in a text such as 0,1; None for None."""
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())
