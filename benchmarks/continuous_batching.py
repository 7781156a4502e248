"""Compare continuous with static batches: tokens/s of sampling completions of skewed lengths.

    python -m benchmarks.continuous_batching

Four of five requests ask for 16 tokens, the others for 256, in a random order; nothing else ends a completion.
`continuous` is the engine. `static` samples the same requests with the same model in batches in their order; a batch
starts when all of the one before are finished. Finished sequences leave it whenever half of it is finished. Both give
the same tokens.
"""

import tempfile
from collections.abc import Sequence
from statistics import median

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.measure import median_ratio, print_table, take_turns
from benchmarks.models import make_model
from ludic.engines import (
    CachedSequences,
    GenerationRequest,
    SamplingParams,
    TransformersEngine,
    generate_all,
    make_rows,
    random_numbers,
    sample,
)
from ludic.settings import run_script

_VOCABULARY = 1024


def main(quick: bool = False) -> None:
    """Print a table with a row for each size of model.

    Args:
        quick: Use one small model and few short requests, to check that the benchmark works.
    """
    widths, num_requests, max_batch, rounds = ((64,), 8, 4, 1) if quick else ((64, 256), 128, 16, 3)
    short, long = (2, 32) if quick else (16, 256)
    rows = [_measure(width, skewed_requests(num_requests, short, long), max_batch, rounds) for width in widths]
    columns = ["width", "tokens/s, static", "tokens/s, continuous", "of static", "lowest", "highest"]
    title = f"continuous_batching: {num_requests} requests, 20% of {long} tokens, 80% of {short}, {max_batch} at once"
    print_table(title, columns, rows)


def _measure(width: int, requests: Sequence[GenerationRequest], max_batch: int, rounds: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        make_model(
            attention="sdpa",
            vocab_size=_VOCABULARY,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=4,
            num_attention_heads=width // 32,
            num_key_value_heads=2,
            head_dim=32,
        ).save_pretrained(folder)
        engine = TransformersEngine(folder, device="cpu", max_batch=max_batch)
    found: dict[str, list[list[int]]] = {}

    def static() -> None:
        found["static"] = sample_statically(engine._model, requests, max_batch)

    def continuous() -> None:
        found["continuous"] = [completion.tokens.tolist() for completion in generate_all(engine, requests)]

    seconds = take_turns({"static": static, "continuous": continuous}, rounds)
    assert found["static"] == found["continuous"], "the contestants sampled different tokens"
    num_tokens = sum(map(len, found["static"]))
    speeds = [num_tokens / median(seconds[name]) for name in ("static", "continuous")]
    ratios = [slow / fast for slow, fast in zip(seconds["static"], seconds["continuous"], strict=True)]
    ratio = median_ratio(seconds["static"], seconds["continuous"])
    return [
        str(width),
        *(f"{speed:,.0f}" for speed in speeds),
        *(f"{r:.2f}x" for r in (ratio, min(ratios), max(ratios))),
    ]


def skewed_requests(num: int, short: int, long: int) -> list[GenerationRequest]:
    """Return requests with prompts of 8 to 32 tokens. short, long: tokens of four of five answers, and of the fifth."""
    rng = np.random.default_rng(0)
    lengths = np.where(np.arange(num) % 5 == 0, long, short)
    rng.shuffle(lengths)
    return [
        GenerationRequest(
            prompt_tokens=rng.integers(0, _VOCABULARY, rng.integers(8, 33)).astype(np.int32),
            params=SamplingParams(max_tokens=max_tokens),
            seed=seed,
        )
        for seed, max_tokens in enumerate(lengths.tolist())
    ]


def sample_statically(model: PreTrainedModel, requests: Sequence[GenerationRequest], max_batch: int) -> list[list[int]]:
    """Return the tokens of each request."""
    batches = [requests[start : start + max_batch] for start in range(0, len(requests), max_batch)]
    with torch.inference_mode():
        return [tokens for batch in batches for tokens in _sample_batch(model, batch)]


def _sample_batch(model: PreTrainedModel, requests: Sequence[GenerationRequest]) -> list[list[int]]:
    params = [request.params for request in requests]
    max_tokens = torch.tensor([p.max_tokens for p in params])
    steps = int(max_tokens.max())
    uniforms = torch.from_numpy(np.stack([random_numbers(request.seed).random(steps) for request in requests]))
    rows, index = make_rows(params, model.device), torch.arange(len(requests))
    sequences = CachedSequences(model, [request.prompt_tokens for request in requests], max_length=32_768)
    tokens = torch.zeros(len(requests), steps, dtype=torch.int64)
    for step in range(steps):
        drawn = sample(sequences.logits, rows, uniforms[index, step]).tokens
        tokens[index, step] = drawn
        live = (max_tokens[index] > step + 1).nonzero()[:, 0]
        if len(live) == 0:
            break
        if len(live) <= len(index) // 2:
            index, drawn = index[live], drawn[live]
            rows = make_rows([params[row] for row in index.tolist()], model.device)
            sequences.select(live)
        sequences.extend(drawn)
    return [row[: p.max_tokens] for row, p in zip(tokens.tolist(), params, strict=True)]


if __name__ == "__main__":
    run_script(main, description=__doc__)
