"""Record the experts that a mixture-of-experts router chooses for each token, or replay recorded choices.

Sampler and trainer round differently, so near a tie the trainer's router may choose other experts, which changes a
token's logprob abruptly. Router replay sends each token in the trainer to the experts of the sampler, with the
trainer's own weights for them (Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and
Inference Routers").

Every supported router ends in `torch.topk` over the scores of its experts. A router is recognized by that call within a
module with `experts`, so no list of families is needed; a family whose router chooses in another way is refused.

Pure tensor code. Raises ModelError, with the reason, for a model whose routers are not supported.
"""

# Shapes: T = tokens of a forward pass, L = layers with experts, K = experts that a token is sent to.

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from ludic.errors import ModelError
from ludic.models.sizes import CHOSEN, EXPERTS, first_of
from ludic.models.weight_files import make_model
from ludic.records import UNKNOWN_EXPERT, Routing

_CHOICE = "_ludic_choice"
"""Attribute of a module with experts: handler of its router's choice, None outside `record` and `replay`."""


class Routers:
    """The routers of a model, in the order of its layers."""

    def __init__(self, model: PreTrainedModel, where: str) -> None:
        """Prepare the model in place, once; forward passes are unchanged outside `record` and `replay`.

        where: the model's name in errors. Raises ModelError if the model has no experts.
        """
        self.num_experts, self.chosen = _numbers(model.config, where)
        self._where = where
        self._blocks = [module for module in model.modules() if _has_experts(module)]
        if not self._blocks:
            raise ModelError(f"{where}: ludic does not know the experts of {type(model).__name__}")
        for block in self._blocks:
            if not hasattr(block, _CHOICE):
                setattr(block, _CHOICE, None)
                block.forward = partial(_run, block, block.forward)

    @property
    def shape(self) -> tuple[int, int]:
        """(L, K)."""
        return len(self._blocks), self.chosen

    @contextmanager
    def record(self) -> Iterator[Callable[[], Tensor]]:
        """Record a forward pass in the block; afterwards the function returns its experts, (T, L, K) int16, ascending.

        T counts all tokens of the pass, row by row. Raises ModelError if a router did not choose as ludic knows it.
        """
        choices = [_Recorded(self.num_experts, self.chosen) for _ in self._blocks]
        with self._with(choices):
            yield lambda: torch.stack([choice.experts() for choice in choices], dim=1).sort(-1).values.short()
            self._check(choices)

    @contextmanager
    def replay(self, experts: Tensor) -> Iterator[Callable[[], Tensor]]:
        """Send tokens to these experts, in the block's forward passes and in their backward passes.

        experts: (T, L, K) of integers, ascending, on the model's device; UNKNOWN_EXPERT leaves a token to the router.
        The function returns for each token the share of layers whose router would have chosen other experts, (T,)
        float32. Where it would have chosen the same ones, the result is the same to the bit. Raises ModelError if a
        router did not choose as ludic knows it.
        """
        choices = [_Replayed(self.num_experts, self.chosen, of_layer) for of_layer in experts.unbind(1)]
        with self._with(choices):
            yield lambda: torch.stack([choice.differs for choice in choices]).float().mean(0)
            self._check(choices)

    @contextmanager
    def _with(self, choices: "Sequence[_Choice]") -> Iterator[None]:
        if len(choices) != len(self._blocks):
            raise ModelError(
                f"{self._where}: experts of {len(choices)} layers, the model has them in {len(self._blocks)} layers"
            )
        for block, choice in zip(self._blocks, choices, strict=True):
            setattr(block, _CHOICE, choice)
        try:
            yield
        finally:
            for block in self._blocks:
                setattr(block, _CHOICE, None)

    def _check(self, choices: "Sequence[_Choice]") -> None:
        numbers = [choice.num_calls for choice in choices]
        if numbers != [1] * len(numbers):
            raise ModelError(
                f"{self._where}: its routers choose experts in a way that ludic does not know (wanted one call of "
                f"torch.topk over {self.num_experts} experts in each layer, found {numbers}); set keep_experts and "
                "replay_experts to False"
            )


def routing_of(config: PreTrainedConfig, where: str) -> Routing:
    """Return the layers and experts that a configuration's routers choose from. Loads no weights.

    Raises ModelError if such a model has no experts.
    """
    num_experts, chosen = _numbers(config, where)
    with torch.device("meta"):
        model = make_model(config)
    names = [name for name, module in model.named_modules() if _has_experts(module)]
    layers = [next(int(part) for part in name.split(".") if part.isdigit()) for name in names]
    return Routing(layers=tuple(layers), chosen=chosen, num_experts=num_experts)


def _numbers(config: PreTrainedConfig, where: str) -> tuple[int, int]:
    """Return the number of experts of a layer, and the number that a token is sent to."""
    text = config.get_text_config(decoder=True)
    found = [first_of(text, names) for names in (EXPERTS, CHOSEN)]
    if not all(found) or not all(isinstance(number, int) for number in found):
        raise ModelError(f"{where}: a {config.model_type} model of this configuration has no experts to keep or replay")
    return found[0], found[1]


def _has_experts(module: nn.Module) -> bool:
    # JetMoE has experts in its attention, too, under other names.
    is_attention = type(module).__name__.endswith("Attention")
    return not is_attention and any(name == "experts" for name, _ in module.named_children())


def _run(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    choice = getattr(block, _CHOICE)
    return forward(*args, **kwargs) if choice is None else _run_with(choice, forward, *args, **kwargs)


@torch.compiler.disable
def _run_with(choice: "_Choice", forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    choice.num_calls = 0  # a layer is run again when its activations are computed for the backward pass
    with choice:
        return forward(*args, **kwargs)


class _Choice(TorchFunctionMode):
    """Handles the call by which one router chooses its experts."""

    def __init__(self, num_experts: int, chosen: int) -> None:
        super().__init__()
        self._num_experts, self._chosen = num_experts, chosen
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        # Routers with groups of experts choose the groups by other calls, whose scores have one more dimension.
        if scores.ndim != 2 or scores.shape[1] != self._num_experts or result.indices.shape[1] != self._chosen:
            return result
        self.num_calls += 1
        return self.see(scores, result)

    def see(self, scores: Tensor, own: Any) -> Any:
        """Return the choice to use. own: the router's own choice, values and indices (T, K)."""
        raise NotImplementedError


class _Recorded(_Choice):
    _indices: Tensor | None = None

    def see(self, scores: Tensor, own: Any) -> Any:
        self._indices = own.indices
        return own

    def experts(self) -> Tensor:
        """Return (T, K) int64."""
        assert self._indices is not None, "no forward pass was recorded"
        return self._indices


class _Replayed(_Choice):
    def __init__(self, num_experts: int, chosen: int, experts: Tensor) -> None:
        """experts: (T, K) of integers."""
        super().__init__(num_experts, chosen)
        self._experts = experts
        self.differs = torch.zeros(len(experts), dtype=torch.bool, device=experts.device)
        """(T,) bool: tokens that the router would have sent elsewhere."""

    def see(self, scores: Tensor, own: Any) -> Any:
        experts = self._experts.long()
        # The router's own order where the experts are the same, so that sums over them round in the same way.
        is_own = (own.indices.sort(-1).values == experts).all(1) | (experts[:, 0] == UNKNOWN_EXPERT)
        self.differs = ~is_own
        indices = torch.where(is_own[:, None], own.indices, experts)
        return torch.return_types.topk((scores.gather(-1, indices), indices))
