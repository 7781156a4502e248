"""Print the documentation of the tables, write it to a file, or check that a file is up to date.

`python -m ludic.schema [--write FILE | --check FILE]`. Exits with 1 and one line if the file is stale.
"""

import argparse
import sys
from pathlib import Path

from ludic.schema.docs import render


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ludic.schema", description=__doc__)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", type=Path, metavar="FILE", help="write the page there")
    action.add_argument("--check", type=Path, metavar="FILE", help="exit 1 unless FILE is the page")
    options = parser.parse_args()
    if options.write:
        options.write.write_text(render(), encoding="utf-8")
    elif options.check:
        return _check(options.check)
    else:
        sys.stdout.write(render())
    return 0


def _check(page: Path) -> int:
    if page.is_file() and page.read_text(encoding="utf-8") == render():
        return 0
    print(f"{page} is stale or missing; run `python -m ludic.schema --write {page}`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
