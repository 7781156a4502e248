"""Print docs/schemas.md, the documentation of the tables: `python -m ludic.schema`."""

import sys

from ludic.schema.docs import render

if __name__ == "__main__":
    sys.stdout.write(render())
