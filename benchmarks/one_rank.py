"""Compare a gradient step of the trainer on one rank with a packed loop written by hand for the same model and tokens.

    python -m benchmarks.one_rank

All contestants use the same attention, the same micro-batches and the same AdamW, in float32 on the CPU. `by hand`
computes all logits of the response tokens at once, REINFORCE with importance ratios, and nothing else. `trainer` is the
step of `ludic train`, with its metrics. `with FSDP2` is the same on a model sharded with FSDP2, as several ranks have
it. They take turns in one process. Ratios are the median over rounds, with the lowest and the highest.
"""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from transformers import PreTrainedModel

from benchmarks.measure import print_table, take_turns
from benchmarks.models import make_model
from benchmarks.packing import skewed_sequences
from ludic.base import init_distributed, shut_down
from ludic.models import decoder_layers
from ludic.settings import run_script
from ludic.training import TrainConfig, build_optimizer, packed_arguments, register_token_logprobs, train_step
from ludic.training.batches import MicroBatch, assign, pack

_SIZES = {"width 128": (128, 4, 1024), "width 256": (256, 8, 4096)}
"""Hidden size, layers and vocabulary."""


def main(quick: bool = False) -> None:
    """Print a row for each size of model and each micro-batch budget.

    Args:
        quick: Use the smallest size and one round, to check that the benchmark works; the figures mean nothing.
    """
    mesh = init_distributed("cpu")
    rows = []
    for name, size in list(_SIZES.items())[: 1 if quick else None]:
        for budget in (1024,) if quick else (1024, 8192):
            rows.append([name, f"{budget:,}", *_measure(mesh, size, budget, rounds=1 if quick else 9)])
    shut_down()
    columns = ["", "tokens at once", "micro-batches", "by hand", "trainer takes", "with FSDP2"]
    print_table("one_rank: a step of the trainer against a packed loop by hand", columns, rows)


def _measure(mesh: DeviceMesh, size: tuple[int, int, int], budget: int, rounds: int) -> list[str]:
    sequences = skewed_sequences(32, 128, 1024, vocab_size=size[2])
    lengths = np.array([sequence.num_tokens for sequence in sequences])
    batches = [pack([sequences[i] for i in plan]) for plan in assign(lengths, 1, budget)[0]]
    num_action_tokens = sum(sequence.num_action_tokens for sequence in sequences)
    config = TrainConfig.of(max_tokens_per_micro_batch=budget)
    by_hand, whole, sharded = (_model(*size) for _ in range(3))
    shard_always(sharded, mesh)

    def trainer(model: PreTrainedModel) -> Callable[[], object]:
        return partial(
            train_step,
            model,
            build_optimizer(model, config),
            batches,
            config=config,
            num_action_tokens=num_action_tokens,
            num_ranks=1,
            learning_rate=config.optimizer.learning_rate,
        )

    contestants: dict[str, Callable[[], object]] = {
        "hand": partial(step_by_hand, by_hand, build_optimizer(by_hand, config), batches, num_action_tokens),
        "trainer": trainer(whole),
        "fsdp": trainer(sharded),
    }
    seconds = take_turns(contestants, rounds)
    ratios = (
        [slow / fast for slow, fast in zip(seconds[name], seconds["hand"], strict=True)] for name in ("trainer", "fsdp")
    )
    return [
        str(len(batches)),
        f"{1e3 * median(seconds['hand']):.0f} ms",
        *(f"{median(found):.2f}x ({min(found):.2f} to {max(found):.2f})" for found in ratios),
    ]


def _model(width: int, num_layers: int, vocab_size: int) -> PreTrainedModel:
    return make_model(
        tie_word_embeddings=True,
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 64,
        num_key_value_heads=1,
        head_dim=64,
    )


def shard_always(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard with FSDP2 as `ludic.training.model.shard` does for several ranks."""
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_token_logprobs(model)


def step_by_hand(
    model: PreTrainedModel, optimizer: Optimizer, batches: Sequence[MicroBatch], num_action_tokens: int
) -> None:
    """Update the weights once."""
    for batch in batches:
        logprobs = _logprobs(model, batch)
        ratio = (logprobs - batch.sampler_logprobs).detach().exp()
        (-(ratio * logprobs * batch.advantages).sum() / num_action_tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _logprobs(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    hidden = model.get_decoder()(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        **packed_arguments(batch.sequence_lengths, batch.input_ids.device),
    ).last_hidden_state[0, batch.logit_positions]
    return model.lm_head(hidden).log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]


if __name__ == "__main__":
    run_script(main, description=__doc__)
