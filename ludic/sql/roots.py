"""Open one or several roots, to read them together.

Raises MissingRootError if there is no run, QueryError if the roots can't be read together.
"""

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any, Protocol, TypeGuard

import pyarrow as pa

from ludic.errors import QueryError
from ludic.schema import rollouts_schema
from ludic.store import Root


class HasRoot(Protocol):
    """An opened run: ludic.Run, which this layer does not import."""

    root: Root


RootLike = str | PathLike[str] | Root | HasRoot
"""Folder or URL of a run, an opened Root, or a ludic.Run."""

ROOT_COLUMN = "root"
"""Column of views and scans: the URL of a row's root, as the user gave it."""


def open_roots(roots: Iterable[RootLike | Iterable[RootLike]]) -> list[Root]:
    """Open the roots of a call, given as separate arguments or as a list. Raises QueryError for none or duplicates."""
    given: list[Any] = []
    for each in roots:
        given += each if isinstance(each, Iterable) and not isinstance(each, str) else [each]
    if not given:
        raise QueryError("there is no root to read; give the folder or URL of at least one run")
    opened = [root.root if _is_opened(root) else _open(root) for root in given]
    _refuse_doubles(opened)
    _refuse_different_columns(opened)
    return opened


def _is_opened(run: Any) -> TypeGuard[HasRoot]:
    return isinstance(getattr(run, "root", None), Root)  # a Path has a root, too: the text "/"


def _open(root: str | PathLike[str] | Root) -> Root:
    return root if isinstance(root, Root) else Root.open(str(root))


def _refuse_doubles(roots: Sequence[Root]) -> None:
    seen: dict[str, str] = {}
    for root in roots:
        url = root.fs.unstrip_protocol(root.path)
        if url in seen:
            raise QueryError(f"{root.url} is the same folder as {seen[url]}; name each root once")
        seen[url] = root.url


def _refuse_different_columns(roots: Sequence[Root]) -> None:
    """Raise QueryError if two runs have extra columns of the same name whose types have no common type."""
    first: dict[str, tuple[pa.Field, str]] = {}
    for root in roots:
        for column in rollouts_schema(root.run.extra_columns):
            known, url = first.setdefault(column.name, (column, root.url))
            try:
                pa.unify_schemas([pa.schema([known]), pa.schema([column])], promote_options="permissive")
            except pa.ArrowException as error:
                raise QueryError(
                    f"column {column.name} is {known.type} in {url} and {column.type} in {root.url}; "
                    "read these roots one at a time"
                ) from error
