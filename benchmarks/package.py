"""Count the packages that ludic brings, without extras and with [train], and time its first imports.

    .venv/light/bin/python -m benchmarks.package       # in the environment of `make light`, or in any other

Packages and bytes are those of the requirements that are installed, as their RECORD files list them, without bytecode.
The extra is left out where it is not installed. Times are of new processes of this Python; --folder names a checkout of
another version to time.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from statistics import median

from packaging.requirements import Requirement

from benchmarks.measure import print_table
from ludic.base import LUDIC, TRAIN
from ludic.settings import run_script

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import ludic": ["-c", "import ludic"],
    "ludic --help": ["-m", "ludic", "--help"],
}


def main(rounds: int = 10, folder: str = ".", quick: bool = False) -> None:
    rows = []
    for extras in ((), (TRAIN,)):
        try:
            found = packages(LUDIC, extras)
        except PackageNotFoundError as error:
            print(f"[{TRAIN}] is not installed here: {error}")
            continue
        size = sum(map(size_of, found.values()))
        name = ", ".join((LUDIC, *extras))
        rows.append([name, str(len(found)), f"{size / 1e6:,.0f} MB"])
    print_table("package: what is installed", ["", "packages", "size"], rows)
    seconds = {
        name: sorted(seconds_of(args, folder) for _ in range(1 if quick else rounds)) for name, args in COMMANDS.items()
    }
    times = [[name, f"{median(each):.2f} s ({each[0]:.2f} to {each[-1]:.2f})"] for name, each in seconds.items()]
    print_table("package: a new process", ["", "median, lowest and highest"], times)


def packages(
    name: str, extras: tuple[str, ...], found: dict[str, Distribution] | None = None
) -> dict[str, Distribution]:
    """Return a package and all that it requires, by name. Raises PackageNotFoundError for one that is not installed."""
    found = {} if found is None else found
    own = distribution(name)
    found[name.lower().replace("_", "-")] = own
    for requirement in map(Requirement, own.requires or ()):
        is_wanted = not requirement.marker or any(
            requirement.marker.evaluate({"extra": each}) for each in ("", *extras)
        )
        key = requirement.name.lower().replace("_", "-")
        if is_wanted and (key not in found or requirement.extras):
            found |= packages(requirement.name, tuple(requirement.extras), found)
    return found


def size_of(package: Distribution) -> int:
    """Return the bytes of a package's files."""
    return sum(_sizes(package))


def _sizes(package: Distribution) -> Iterator[int]:
    for file in package.files or ():
        path = file.locate()
        if file.suffix != ".pyc" and path.is_file():  # type: ignore[attr-defined]
            yield path.stat().st_size  # type: ignore[attr-defined]


def seconds_of(args: list[str], folder: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *args], check=True, stdout=subprocess.DEVNULL, cwd=folder)
    return time.perf_counter() - start


if __name__ == "__main__":
    run_script(main)
