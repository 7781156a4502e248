"""Look at the runs of a folder, and run a grid of them."""

from os import PathLike
from typing import TYPE_CHECKING, Annotated, Literal

from ludic.app.operations.operation import operation
from ludic.settings import Shown

if TYPE_CHECKING:
    from ludic.app.show.run_table import RunTable

SortKey = Literal["name", "began", "state", "step", "reward", "tokens", "seconds"]


@operation(group="Look", place=0)
def runs(
    folder: Annotated[str | PathLike[str], Shown("FOLDER", by_position=True)], sort: SortKey = "name"
) -> "RunTable":
    """List the runs below a folder: state, step, reward, and the settings in which they differ.

    Three levels of folders are searched, or of a bucket's prefixes. A branch comes below the run that it left. A run
    that can't be read is listed with the reason. Reads a few small files of each run. In Python, `frame()` of the
    result is a Polars DataFrame with a row for each run. Raises ConfigError for a folder that is none.

    Args:
        folder: Folder or URL with runs below it, or a run.
        sort: Column to sort by. Names, times and states go up, figures down; a branch stays below its run.
    """
    from ludic.app.show.run_table import tabulate

    return tabulate(folder, sort)
