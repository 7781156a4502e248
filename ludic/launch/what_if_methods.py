"""Methods of `ludic.Run` that ask what else could have been: what_if, bisect, cut.

Each imports what it needs when it is called, so that `import ludic` stays light.
"""

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Literal

from ludic.errors import ConfigError
from ludic.store.root import Track, untracked

if TYPE_CHECKING:
    from ludic.sql.connect import HasRoot
    from ludic.viewer.what_if import Bisection, CutOut, WhatIf


def what_if(
    self: "HasRoot",
    *,
    advantage: str | None = None,
    filters: Sequence[str] | None = None,
    algorithm: str | None = None,
    sql_params: Mapping[str, Any] | None = None,
    steps: str | None = None,
    train: str | PathLike[str] | None = None,
    from_step: int | None = None,
    num_steps: int | None = None,
    track: Track = untracked,
) -> "WhatIf":
    """Plan stored batches by other rules, and compare with what happened; nothing is written to the run.

    advantage, filters, sql_params: as for a trainer; None keeps the run's. algorithm: preset of settings. steps: "7" or
    "10-20"; None is all. `rows` and `steps` of the result are Polars DataFrames. train: root of a branch to train with
    these rules, from the policy of `from_step` on, for `num_steps` steps; None trains as many as the run has.
    Raises ConfigError if steps or rollouts are missing, QueryError, ConsentError.
    """
    from ludic.launch.branch import train_branch
    from ludic.viewer.what_if import WhatIf
    from ludic.what_if.rerun import given_settings, rerun

    if (train is None) != (from_step is None) or (train is None and num_steps is not None):
        raise ConfigError("train and from_step go together, and num_steps needs both")
    names = None if filters is None else tuple(filters)
    given = given_settings(advantage=advantage, filters=names, algorithm=algorithm, sql_params=sql_params)
    found = rerun(self.root, given, steps, track)
    commands: list[str] = []
    if train is not None and from_step is not None:
        commands = train_branch(self.root, fspath(train), given, from_step, num_steps)
    branch = None if train is None else fspath(train)
    return WhatIf(url=self.root.url, given=given, rerun=found, branch=branch, commands=commands)


def bisect(
    self: "HasRoot", predicate: str, table: Literal["metrics", "rollouts", "evals", "batches"] = "metrics"
) -> "Bisection":
    """Find the first step at which a SQL predicate is true, by binary search, which assumes that it turns true once.

    table: rows of a step that the predicate sees: the trainer's metrics, the rollouts it trained on, the evaluations of
    the version it published, or its ledger. The predicate is an aggregate, or true of any one row. NULL and no rows
    count as not true. Raises QueryError for a wrong predicate, ConfigError if rows are missing.
    """
    from ludic.viewer.what_if import Bisection
    from ludic.what_if.bisect import bisect

    return Bisection(url=self.root.url, found=bisect(self.root, predicate, table))


def cut(self: "HasRoot", step: int, out: str | PathLike[str]) -> "CutOut":
    """Write the smallest folder that replays a step bit for bit, a root of its own with a README.txt.

    out: a local folder that does not exist or is empty. Raises ConfigError, which names what is missing.
    """
    from ludic.viewer.what_if import CutOut
    from ludic.what_if.cut import cut

    return CutOut(url=self.root.url, cut=cut(self.root, step, fspath(out)))
