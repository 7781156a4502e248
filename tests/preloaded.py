"""One fork server for all test files of a process, which has imported what any of them needs.

A process then starts in some ms, in the place of the seconds that imports take. A server keeps the modules that it was
started with, so each file names its own here when it is imported.
"""

import multiprocessing
from multiprocessing.context import ForkServerContext

_names: set[str] = set()


def fork_server(*modules: str) -> ForkServerContext:
    """Return the context whose processes find these modules imported; installed ones alone are found."""
    _names.update(modules)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(sorted(_names))
    return context
