"""Layers with a state on a whole pack at once: only where the installed kernels begin anew at the borders of sequences.

No kernel for CUDA runs here. Kernels that keep borders are stood in for by transformers' own functions, called for one
sequence after the other.
"""

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from model_families import small_model_of
from torch import Tensor
from transformers import AutoConfig

from ludic.training.batches.packing import pack
from ludic.training.logprobs import token_logprobs
from ludic.training.model import kernels_keep_borders
from ludic.training.packed import by_sequence, run_at_once

CPU = torch.device("cpu")
DELTA = ("qwen3_next", "qwen3_5_text", "olmo_hybrid")
"""Families whose mixers are a convolution and a gated delta rule."""
OPTIONS: dict[str, Any] = {"lfm2": {"layer_types": ["conv", "full_attention"] * 16}}


def modeling(family: str) -> Any:
    return sys.modules[type(small_model_of(family, **OPTIONS.get(family, {}))).__module__]


def convolution(plain: Callable[..., Tensor], calls: list[int]) -> Callable[..., Tensor]:
    """By seq_idx, which numbers the sequences of tokens: (1, C, T) in and out."""

    def convolve(x: Tensor, *args: Any, seq_idx: Tensor | None = None, **kwargs: Any) -> Tensor:
        calls.append(1)
        lengths = [x.shape[2]] if seq_idx is None else seq_idx[0].bincount().tolist()
        return torch.cat([plain(part, *args, **kwargs) for part in x.split(lengths, dim=2)], dim=2)

    return convolve


def delta_rule(plain: Callable[..., Any]) -> Callable[..., Any]:
    """By cu_seqlens, the starts of sequences: query, key, value, gates are (1, T, ...)."""

    def rule(query: Tensor, key: Tensor, value: Tensor, *, cu_seqlens: Tensor | None = None, **kwargs: Any) -> Any:
        bounds = [0, query.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()

        def part(of: Any, start: int, end: int) -> Any:
            return of[:, start:end] if isinstance(of, Tensor) else of

        given = {"g", "beta"} & kwargs.keys()
        outputs = [
            plain(
                *(each[:, start:end] for each in (query, key, value)),
                **kwargs | {name: part(kwargs[name], start, end) for name in given},
            )[0]
            for start, end in pairwise(bounds)
        ]
        return torch.cat(outputs, dim=1), None

    return rule


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[int]]]:
    """Gives a family functions that keep borders; returns the list of calls of its convolution."""

    def replace(family: str, *, rule: bool = True) -> list[int]:
        module, calls = modeling(family), list[int]()
        monkeypatch.setattr(module, "causal_conv1d_fn", convolution(module.causal_conv1d_fn, calls))
        if rule and hasattr(module, "torch_chunk_gated_delta_rule"):
            name = "torch_chunk_gated_delta_rule"
            monkeypatch.setattr(module, name, delta_rule(getattr(module, name)))
        return calls

    return replace


@pytest.mark.parametrize("family", [*DELTA, "lfm2"])
def test_kernels_that_keep_borders_run_once_for_a_whole_pack(keeping, sequences, family):
    options = OPTIONS.get(family, {})
    config = AutoConfig.for_model(family, **options)
    batch = pack(sequences(5, seed=1))
    plain, whole = (small_model_of(family, **options) for _ in range(2))
    calls = keeping(family)
    wanted = token_logprobs(plain, batch)[0]
    one_by_one, calls[:] = len(calls), []
    run_at_once(whole)
    found = token_logprobs(whole, batch)[0]
    assert (len(calls), one_by_one) == (len(by_sequence(whole)), len(by_sequence(whole)) * 5)
    assert (found - wanted).abs().max() < 1e-4
    for logprobs in (found, wanted):
        logprobs.sum().backward()
    for (name, one), (_, other) in zip(whole.named_parameters(), plain.named_parameters(), strict=True):
        if other.grad is not None:
            assert (one.grad - other.grad).norm() <= 1e-3 * other.grad.norm() + 1e-6, name
    assert kernels_keep_borders(config, CPU)


@pytest.mark.parametrize("family", [*DELTA, "lfm2", "nemotron_h", "kimi_linear", "mamba2"])
def test_transformers_own_functions_drop_borders_and_so_mixers_run_one_by_one(family):
    assert not kernels_keep_borders(AutoConfig.for_model(family, **OPTIONS.get(family, {})), CPU)


@pytest.mark.parametrize("family", DELTA)
def test_a_convolution_that_keeps_borders_beside_a_rule_that_does_not_is_not_enough(keeping, family):
    keeping(family, rule=False)
    assert not kernels_keep_borders(AutoConfig.for_model(family), CPU)


def test_a_kernel_that_fails_leaves_mixers_one_by_one(monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("Expected x.is_cuda() to be true")

    monkeypatch.setattr(modeling("qwen3_next"), "causal_conv1d_fn", fail)
    assert not kernels_keep_borders(AutoConfig.for_model("qwen3_next"), CPU)
