"""The allowed type and range of every value that a user can set, so that a typo is refused at once.

Bounds are far above any sensible value, and below the values that overflow a column, a wait or a machine.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from types import MappingProxyType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from ludic.errors import ConfigError
from ludic.masking import SERVER_LOGIN, has_secret, public_url

_LOGINS = {
    "server_url": f"leave it out, and set {SERVER_LOGIN}=user:password where the workers run",
    "judge_url": "name the variable that holds the key in judge_key_env",
}
"""What to do about a secret in a URL, by setting."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """A range from `low` to `high`, both included; with `above`, `low` is excluded."""

    low: float
    high: float
    above: bool = False

    def hold(self, value: float) -> bool:
        """Return whether a value is in the range; NaN never is."""
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def wanted(self, value: float) -> str:
        """Describe the bound that a value outside the range violates, for an error message."""
        if value > self.high:
            return f"at most {self.high:,}"
        return f"a number above {self.low}" if self.above else f"at least {self.low:,}"


_COUNT = Bounds(1, 10**9)
_COUNT_OR_0 = Bounds(0, 10**9)
_INDEX = Bounds(0, 2**63 - 1)
_TOKENS = Bounds(1, 10**8)
_PROCESSES = Bounds(1, 4096)
_SECONDS = Bounds(0, 10**9, above=True)
_WEIGHT = Bounds(0, 10**6, above=True)

BOUNDS: Mapping[str, Bounds] = MappingProxyType(
    {
        # request_index, the number of a group times group_size, fits int64 in all slots that num_workers share.
        "group_size": Bounds(1, 10**5),
        "close_groups_at": Bounds(1, 10**5),
        "groups_per_batch": Bounds(1, 10**6),
        "in_flight": Bounds(1, 10**6),
        "steps_per_version": _COUNT,
        "batches_ahead": Bounds(0, 10**4),
        "num_workers": _PROCESSES,
        "local_workers": Bounds(0, 4096),
        "ranks": _PROCESSES,
        "ray_cpus": Bounds(1, 10**4),
        "workers": _PROCESSES,
        "nodes": _PROCESSES,
        "cpus": Bounds(1, 10**4),
        "memory_gb": Bounds(1, 10**5),
        "max_hours": Bounds(1, 10**5),
        "max_batch": Bounds(1, 10**5),
        "tensor_parallel": Bounds(1, 1024),
        "gpu_memory": Bounds(0, 1, above=True),
        "port": Bounds(1, 65_535),
        "num_threads": Bounds(1, 1024),
        "slot": _COUNT_OR_0,
        "seed": Bounds(-(2**63), 2**63 - 1),
        "temperature": Bounds(0, 100),
        "top_p": Bounds(0, 1, above=True),
        "top_k": _COUNT,
        "max_tokens": _TOKENS,
        "max_steps": Bounds(1, 10**6),
        "curriculum": _COUNT,
        "max_depth": Bounds(0, 100),
        "max_children": Bounds(0, 10**6),
        "max_child_tokens": _TOKENS,
        "max_sequence_tokens": _TOKENS,
        "max_observation_characters": _COUNT,
        "format_reward": Bounds(-(10**6), 10**6),
        "constant_tokens": _TOKENS,
        "max_tokens_per_micro_batch": _TOKENS,
        "logprob_chunk_tokens": _TOKENS,
        "max_seq_len": _TOKENS,
        "num_steps": _COUNT,
        "num_groups": _COUNT,
        "max_uses": _COUNT,
        "epochs": _COUNT,
        "warmup_steps": _COUNT_OR_0,
        "checkpoint_every": _COUNT,
        "keep_checkpoints": _COUNT,
        "keep_checkpoints_every": _COUNT,
        "keep_policies": _COUNT,
        "full_version_every": _COUNT,
        "keep_versions": _COUNT,
        "max_off_policy_steps": _COUNT_OR_0,
        "lora_rank": Bounds(1, 10**5),
        "lora_alpha": Bounds(1, 10**6),
        "learning_rate": Bounds(0, 1000, above=True),
        "weight_decay": Bounds(0, 1000),
        "max_grad_norm": _WEIGHT,
        "betas": Bounds(0, 1),
        "clip_low": _WEIGHT,
        "clip_high": _WEIGHT,
        "dual_clip": _WEIGHT,
        "is_ratio_cap": _WEIGHT,
        "is_ratio_bounds": Bounds(0, 10**6),
        "sapo_tau_positive": _WEIGHT,
        "sapo_tau_negative": _WEIGHT,
        "dppo_low": _WEIGHT,
        "dppo_high": _WEIGHT,
        "mask_sequence_kl": _WEIGHT,
        "is_sequence_ratio_bounds": Bounds(0, 10**6),
        "vespo_k": Bounds(0, 10**6),
        "vespo_lambda": Bounds(0, 10**6),
        "log_ratio_weight": _WEIGHT,
        "dpo_beta": _WEIGHT,
        "orpo_weight": _WEIGHT,
        "entropy_weight": _WEIGHT,
        "kl_weight": _WEIGHT,
        "max_age_s": _SECONDS,
        "rollout_timeout_s": _SECONDS,
        "interval_s": Bounds(0, 86_400, above=True),
        "env_timeout_s": Bounds(0, 86_400, above=True),
        "episode_timeout_s": Bounds(0, 86_400, above=True),
        "stop_within_s": Bounds(1, 43_200),
        # After a trainer dies, the next one waits this long before it takes over.
        "lease_s": Bounds(0, 86_400, above=True),
        "concurrency": Bounds(1, 1024),
        "scorer_timeout_s": Bounds(0, 86_400, above=True),
        "judge_tries": Bounds(1, 100),
        "judge_input_price": Bounds(0, 10**9),
        "judge_output_price": Bounds(0, 10**9),
        "wait_for_scores_s": _SECONDS,
        "n": Bounds(1, 10**5),
        "num_examples": Bounds(1, 10**7),
        "examples_per_call": Bounds(1, 10**5),
        "every": _COUNT,
        "until_step": _COUNT,
        "eval_every": _COUNT,
        "confidence": Bounds(0.5, 0.999999),
        "difference": Bounds(0, 10**6, above=True),
        "max_rows": _COUNT,
        "target_mb": Bounds(1, 10**6),
        "before": _INDEX,
        "step": _INDEX,
        "from_step": _INDEX,
        "replan_from": _INDEX,
        "version": _INDEX,
        "replaces": _COUNT_OR_0,
    }
)


def check_numbers(settings: Any) -> None:
    """Check the numbers of a dataclass; None means off and passes. Raises ConfigError for the first out of range."""
    for name, bounds in BOUNDS.items():
        value = getattr(settings, name, None)
        for number in value if isinstance(value, list | tuple) else (value,):  # JSON has lists
            if number is not None and not bounds.hold(number):
                raise ConfigError(f"{name} is {value}, wanted {bounds.wanted(number)}")


def check_urls(settings: Any) -> None:
    """Check that no value of a dataclass is a URL with a secret. Raises ConfigError, without the secret."""
    for field in fields(settings):
        for text in _texts(getattr(settings, field.name)):
            check_url(text, field.name)


def check_url(text: str, what: str) -> None:
    """Refuse a URL with a secret, which files, logs and lists of processes would show; other texts pass.

    what: the setting's name. Raises ConfigError, without the secret.
    """
    if has_secret(text):
        raise ConfigError(
            f"{what} holds a user, a password or a key ({public_url(text)}), which files, logs and lists of processes "
            f"would show; {_LOGINS.get(what, 'put it into the environment')}"
        )


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value, also in lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)


def check_types(settings: Any, *, is_stored: bool = False) -> None:
    """Check that the values of a dataclass fit the types of its fields; Python itself does not. Raises ConfigError.

    Mappings are left to the class's own checks, which name the key. URLs with secrets are refused too (`check_urls`),
    unless the settings may come from a file of an older ludic (is_stored).
    """
    if not is_stored:
        check_urls(settings)
    given = {field.name: field.type for field in fields(settings) if getattr(settings, field.name) is not field.default}
    checked = {name: kind for name, kind in given.items() if not is_dataclass(kind) and get_origin(kind) is not Mapping}
    if not checked:
        return
    import msgspec  # takes longer than the rest of `ludic --help`

    for name, kind in checked.items():
        value = getattr(settings, name)
        try:
            msgspec.convert(value, kind)
        except TypeError:  # msgspec does not know the type, such as that of an open file
            continue
        except msgspec.ValidationError:
            raise ConfigError(f"{name} is {value!r}, wanted {_describe(kind)}") from None


def _describe(kind: Any) -> str:
    """Describe a type for errors, such as: one of 'token', 'sequence'; int | None; tuple[str, ...]."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    choices = [choice for each in kinds if get_origin(each) is Literal for choice in get_args(each)]
    if choices:
        return f"one of {', '.join(map(repr, choices))}{' or None' if len(kinds) > 1 else ''}"
    if tuple[float, float] in kinds:
        return f"two numbers{' or None' if len(kinds) > 1 else ''}"
    return kind.__name__ if isinstance(kind, type) and get_origin(kind) is None else str(kind)


def check_names(given: Iterable[str], settings: type, what: str) -> None:
    """Check that a dataclass has fields of these names. what: whose settings they are. Raises ConfigError if not."""
    known = [field.name for field in fields(settings)]
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
            raise ConfigError(f"no setting of {what} is called {name!r}; {hint}")
