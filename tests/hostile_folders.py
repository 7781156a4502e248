"""A working directory with modules that ludic's processes would import, were they to look there."""

from pathlib import Path

NAMES = ("ludic", "torch", "multiprocessing", "random", "textual", "ray", "numpy")
MODULE = """
import os
open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "ran-" + __name__), "w").close()
raise SystemExit("a module of the working directory runs")
"""


def hostile_folder(folder: Path) -> Path:
    """Make a folder with such modules, which leave a file when they run."""
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(MODULE)
    return folder


def imported_from(folder: Path) -> list[str]:
    """The modules of the folder that have run."""
    return sorted(path.name.removeprefix("ran-") for path in folder.glob("ran-*"))
