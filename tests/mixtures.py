"""Small mixtures of experts with random weights, and a step of one with router losses."""

import numpy as np
import torch
from model_families import VOCAB_SIZE
from tiny_models import whole
from torch import Tensor
from torch.optim import SGD
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ludic.base.distributed import init_distributed, num_ranks
from ludic.models.families import shrink, spread
from ludic.training.batches.packing import MicroBatch, TrainingSequence, pack
from ludic.training.config import TrainConfig
from ludic.training.model import shard
from ludic.training.packed import PACKED_ATTENTION
from ludic.training.router_losses import keep_router_logits
from ludic.training.step import train_step


def mixture_of(family: str, **settings: object) -> PreTrainedModel:
    """A small model with large random weights; a token uses 2 of 4 experts in each layer."""
    config = shrink(AutoConfig.for_model(family, **settings))
    config.vocab_size = VOCAB_SIZE
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION)
    with torch.no_grad():
        spread(model)
    return model.eval()


def sequence(length: int, seed: int = 0) -> TrainingSequence:
    """A prompt of one token and a response, so `length` tokens go through the model."""
    tokens = np.random.default_rng(seed).integers(3, 100, length + 1, dtype=np.int32)
    return TrainingSequence(
        rollout_id=f"{seed}",
        prompt_tokens=tokens[:1],
        response_tokens=tokens[1:],
        columns={"response_logprobs": np.zeros(length, np.float32)},
        advantage=1.0,
    )


LENGTHS = (19, 7, 12)


def micro_batches() -> list[MicroBatch]:
    """Of 26 and 12 tokens, and the dummies of ranks that have nothing more to do."""
    one, two, three = (sequence(length, seed) for seed, length in enumerate(LENGTHS))
    return [pack([one, two]), pack([three]), pack([]), pack([])]


def step_of(batches: list[MicroBatch], **options: object) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics of a step with router losses, and the gradients that the optimizer saw. options: those of `shard`."""
    model = mixture_of("qwen3_moe")
    keep_router_logits(model, "here")
    shard(model, init_distributed("cpu"), **options)
    optimizer, seen = SGD(model.parameters()), {}
    optimizer.register_step_pre_hook(
        lambda *_: seen.update({name: whole(weight.grad).clone() for name, weight in model.named_parameters()})
    )
    metrics = train_step(
        model,
        optimizer,
        batches,
        config=TrainConfig.of(objective="sft", max_grad_norm=None, router_balance_weight=0.5, router_z_weight=0.25),
        num_action_tokens=sum(LENGTHS),
        num_ranks=num_ranks(),
        learning_rate=0.0,
    )
    return metrics, seen
