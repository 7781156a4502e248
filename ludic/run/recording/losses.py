"""Count and name the groups, steps and metrics that a recorder could not store."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ludic.base import plural

MOST_NAMED = 100
"""Maximum groups that are named; all are counted."""
_MOST_REASONS = 20
_OTHERS = "other reasons"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Data that a recorder has not stored yet; false if there is none."""

    num_rollouts: int = 0
    num_groups: int = 0
    num_steps: int = 0
    """Steps whose ledger waits."""
    reason: str | None = None
    """Why the store fails; None while it works."""

    def __bool__(self) -> bool:
        return bool(self.num_groups or self.num_steps)

    def __str__(self) -> str:
        """Waiting data and the reason, on one line."""
        if not self:
            return "nothing waits"
        rows = f"{plural(self.num_rollouts, 'rollout')} in {plural(self.num_groups, 'group')}"
        ledgers = f"the ledger of {plural(self.num_steps, 'step')}"
        what = " and ".join([rows] * bool(self.num_groups) + [ledgers] * bool(self.num_steps))
        return f"{what} wait to be stored{f': {self.reason}' if self.reason else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Data that a recorder could not store, finally or so far; false if there is none."""

    num_rollouts: int = 0
    num_groups: int = 0
    group_ids: Sequence[str] = ()
    """The first MOST_NAMED groups."""
    steps: Sequence[tuple[int, int]] = ()
    """Steps without a ledger, or without some rows of it, as half-open intervals."""
    steps_without_metrics: Sequence[tuple[int, int]] = ()
    """Steps with metrics that are not stored, as half-open intervals."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Number of lost groups, steps and rows of metrics by reason, with about 20 reasons at most; rows without a group
    that are counted together count as 1."""
    waiting: Waiting = field(default_factory=Waiting)
    """Data that waits while the store fails, and is stored once it works again."""

    def __bool__(self) -> bool:
        return bool(self.reasons or self.waiting)

    def __str__(self) -> str:
        """Lost data and the reasons, on one line."""
        if not self:
            return "nothing was lost"
        groups = f" in {plural(self.num_groups, 'group')}" if self.num_groups else ""
        parts = [f"{plural(self.num_rollouts, 'rollout')}{groups}"] if self.num_rollouts or self.num_groups else []
        parts += [f"the ledger of {_named(self.steps)}"] if self.steps else []
        parts += [f"the metrics of {_named(self.steps_without_metrics)}"] if self.steps_without_metrics else []
        lost = [f"lost: {', '.join(parts)} ({'; '.join(self.reasons)})"] if self.reasons else []
        return "; ".join([*lost, *([str(self.waiting)] if self.waiting else [])])


def _named(spans: Sequence[tuple[int, int]]) -> str:
    texts = [str(first) if end == first + 1 else f"{first} to {end - 1}" for first, end in spans]
    return f"step{'s' if len(texts) > 1 or spans[0][1] > spans[0][0] + 1 else ''} {', '.join(texts)}"


class Losses:
    """Counts losses as they happen. Not safe from several threads."""

    def __init__(self) -> None:
        self._num_rollouts = self._num_groups = 0
        self._group_ids: list[str] = []
        self._steps: set[int] = set()
        self._numbers: set[int] = set()
        self._reasons: Counter[str] = Counter()
        self._so_far: Lost | None = Lost()
        """Result of `so_far`; None if something was added since."""

    def add_groups(self, group_ids: Sequence[str], num_rollouts: int, reason: str, *, num_unnamed: int = 0) -> None:
        """Count groups with all their rows. num_unnamed: number of further groups, without ids."""
        self._num_rollouts += num_rollouts
        self._num_groups += len(group_ids) + num_unnamed
        self._group_ids += group_ids[: MOST_NAMED - len(self._group_ids)]
        self._add(reason, max(1, len(group_ids) + num_unnamed))

    def add_step(self, step: int, reason: str) -> None:
        """Count a step without a ledger."""
        self._steps.add(step)
        self._add(reason, 1)

    def add_numbers(self, step: int, reason: str) -> None:
        """Count a step whose metrics are not stored."""
        self._numbers.add(step)
        self._add(reason, 1)

    def so_far(self) -> Lost:
        """Return the counts."""
        if self._so_far is None:
            self._so_far = self._count()
        return self._so_far

    def _add(self, reason: str, count: int) -> None:
        is_named = reason in self._reasons or len(self._reasons) < _MOST_REASONS
        self._reasons[reason if is_named else _OTHERS] += count
        self._so_far = None

    def _count(self) -> Lost:
        return Lost(
            num_rollouts=self._num_rollouts,
            num_groups=self._num_groups,
            group_ids=tuple(self._group_ids),
            steps=_spans(self._steps),
            steps_without_metrics=_spans(self._numbers),
            reasons=dict(self._reasons),
        )


def _spans(steps: set[int]) -> tuple[tuple[int, int], ...]:
    """Return steps as half-open intervals."""
    spans: list[tuple[int, int]] = []
    for step in sorted(steps):
        if spans and spans[-1][1] == step:
            spans[-1] = (spans[-1][0], step + 1)
        else:
            spans.append((step, step + 1))
    return tuple(spans)
