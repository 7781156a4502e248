"""AdamW and its learning rate, which is a pure function of the step and is not stored."""

import math

from torch import nn
from torch.optim import AdamW, Optimizer

from ludic.training.config import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Return AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101); 1-D parameters (norms, biases) do not decay.

    `train_step` sets the learning rate at each step.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.optimizer.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    # Adapters have only matrices, and an empty group can't be checkpointed.
    groups = [group for group in groups if group["params"]]
    return AdamW(groups, lr=config.optimizer.learning_rate, betas=config.optimizer.betas)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of a gradient step; steps count from 1 to num_steps.

    It rises linearly to config.learning_rate at step warmup_steps. Then it stays constant or falls towards 0,
    which it would reach one step after the last.
    """
    if step <= config.optimizer.warmup_steps:
        return config.optimizer.learning_rate * step / config.optimizer.warmup_steps
    progress = (step - config.optimizer.warmup_steps - 1) / (config.num_steps - config.optimizer.warmup_steps)
    progress = min(progress, 1.0)
    if config.optimizer.schedule == "linear":
        return config.optimizer.learning_rate * (1 - progress)
    if config.optimizer.schedule == "cosine":
        return config.optimizer.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
    return config.optimizer.learning_rate
