"""Log ratios of two policies: the bound that keeps exp finite, and estimators of a KL. Pure tensor code, in nats."""

from collections.abc import Callable, Mapping

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound, on both sides and in nats, of every log ratio that goes through exp, as in verl (core_algos.py,
rollout_corr_helper.py). exp(20) is 4.9e8; exp(89) is infinite in float32 and makes the gradient NaN even if the term
is clipped. Beyond the bound a token has no gradient through its ratio."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Return the log ratio clamped to MAX_LOG_RATIO."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


# Estimators of KL(policy || reference) at samples of the policy, from log(reference / policy); Schulman 2020,
# "Approximating KL divergence". As a loss on-policy, k1 has an expected gradient of 0, and k2 the right gradient.


def k1(log_ratio: Tensor) -> Tensor:
    """-log(p/q): unbiased, of either sign."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """log(p/q)^2 / 2: biased, never below 0."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """p/q - 1 - log(p/q): unbiased within MAX_LOG_RATIO, never below 0."""
    log_ratio = bounded(log_ratio)
    return log_ratio.expm1() - log_ratio


KL_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
