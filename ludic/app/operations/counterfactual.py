"""Ask what else could have been: other rules for stored batches, the first step of a change, one step cut out."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ludic.app.operations.operation import operation
from ludic.app.operations.start import Algorithm
from ludic.base import Track, untracked
from ludic.settings import Index, PositiveCount, SettingsError, Shown

if TYPE_CHECKING:
    from ludic.app.operations.run import Run
    from ludic.app.show.what_if import Bisection, CutOut, WhatIf


@operation(group="Ask again", place=1)
def what_if(
    run: "Run",
    *,
    advantage: str | None = None,
    filters: Sequence[str] | None = None,
    algorithm: Algorithm = None,
    sql_params: Mapping[str, Any] | None = None,
    steps: str | None = None,
    train: Annotated[str | PathLike[str] | None, Shown("OUT_ROOT")] = None,
    from_step: Index | None = None,
    num_steps: PositiveCount | None = None,
    track: Track = untracked,
) -> "WhatIf":
    """Plan a run's stored batches by another advantage, filters or algorithm.

    Compares with what happened; nothing is written to the run. `rows` and `steps` of the result are Polars DataFrames.
    Raises ConfigError if steps or rollouts are missing, QueryError, ConsentError.

    Args:
        advantage: Advantage to use instead: a name, path/to/file.sql, or path/to/file.py:function. None keeps the
            run's.
        filters: Filters to use instead: names, or paths of .sql files; --filters alone uses none. None keeps the run's.
        algorithm: Use the advantage, filters and loss settings of this algorithm (docs/algorithms.md).
        sql_params: Values of the $parameters of the SQL, as JSON. Without it, those of the run that the SQL takes.
        steps: Steps to look at: one such as 7, or a range such as 10-20. None is all.
        train: Root of a branch, a new run to train with these settings on the run's stored batches; needs --from-step.
        from_step: Step whose policy the branch begins with; 0 is the first policy.
        num_steps: Steps of the branch. None trains as many as the run has after --from-step.
    """
    from ludic.app.show.what_if import WhatIf
    from ludic.eval import given_settings, rerun

    if (train is None) != (from_step is None) or (train is None and num_steps is not None):
        raise SettingsError("train and from_step go together, and num_steps needs both")
    names = None if filters is None else tuple(filters)
    given = given_settings(advantage=advantage, filters=names, algorithm=algorithm, sql_params=sql_params)
    found = rerun(run.root, given, steps, track)
    commands: list[str] = []
    branch = None if train is None else str(train)
    if branch is not None and from_step is not None:
        from ludic.app.launch.branch import train_branch  # imports agents and engines, which only training needs

        commands = train_branch(run.root, branch, given, from_step, num_steps)
    return WhatIf(url=run.url, given=given, rerun=found, branch=branch, commands=commands)


@operation(group="Ask again", place=2)
def bisect(
    run: "Run",
    predicate: Annotated[str, Shown("PREDICATE", by_position=True)],
    table: Literal["metrics", "rollouts", "evals", "batches"] = "metrics",
) -> "Bisection":
    """Find the step at which a SQL predicate turns true.

    By binary search, which assumes that it turns true once: steps that it did not look at may differ. The predicate is
    an aggregate, or true of any one row. NULL and no rows count as not true. Raises QueryError for a wrong predicate,
    ConfigError if rows are missing.

    Args:
        predicate: SQL that is true or false of the rows of a step: an expression such as "reward_mean > 5", or an
            aggregate such as "avg(episode_reward) > 0.5". It should turn true once and stay true.
        table: Rows of a step: the trainer's metrics, the rollouts it trained on, the evaluations of the version it
            published, or its ledger.
    """
    from ludic.app.show.what_if import Bisection
    from ludic.eval import bisect

    return Bisection(url=run.url, found=bisect(run.root, predicate, table))


@operation(group="Ask again", place=3)
def cut(run: "Run", step: Index, out: Annotated[str | PathLike[str], Shown("OUT", by_position=True)]) -> "CutOut":
    """Write the smallest folder that replays one step bit for bit.

    It is a root of its own with a README.txt. Raises ConfigError, which names what is missing.

    Args:
        step: Step to cut out.
        out: Local folder to write; it must not exist, or be empty.
    """
    from ludic.app.show.what_if import CutOut
    from ludic.eval import cut

    return CutOut(url=run.url, cut=cut(run.root, step, str(out)))
