"""The reason why a planner has no batch yet."""

from collections.abc import Mapping
from dataclasses import dataclass

COUNT = """
select count(*) as num_rollouts, count(distinct group_id) filter (reason is null) as num_kept_groups
from judged
"""

COUNT_DROPS = """
select reason, count(*)
from judged
where reason is not null
group by reason
order by reason
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """The reason why there is no batch yet."""

    ready_groups: int
    """Number of groups that the selection returns, of those with a row that no filter drops."""
    wanted_groups: int
    num_pending_rollouts: int
    drops: Mapping[str, int]
    """Number of pending rollouts that each filter would drop."""
    selection: str
    num_passed_over: int
    """Number of groups with a row that no filter drops, and that the selection does not return."""
    num_waiting_groups: int = 0
    """Number of groups that wait for scores."""
    waits_for: str | None = None
    """The scores that they wait for, as a part of a sentence."""

    def describe(self) -> str:
        """Return one sentence for the log."""
        parts = [f"{self.ready_groups} of {self.wanted_groups} groups are ready"]
        if self.num_passed_over:
            parts.append(f"selection {self.selection} passes over {self.num_passed_over} more")
        if self.waits_for is not None:
            parts.append(self.waits_for)
        if self.drops:
            most = max(self.drops, key=lambda name: self.drops[name])
            of_all = f"{sum(self.drops.values())} of {self.num_pending_rollouts} rollouts"
            parts.append(f"filters drop {of_all}, {most} most ({self.drops[most]})")
        return "; ".join(parts)
