"""Print docs/schemas.md, the documentation of the tables: `python -m ludic.records`."""

import sys

from ludic.records.docs import render

if __name__ == "__main__":
    sys.stdout.write(render())
