"""Write the table of a root's files into a page of the docs, or check it: `python -m ludic.root PAGE [--check]`."""

import sys
from pathlib import Path

from ludic.root.catalogue import to_markdown

_BEGIN, _END = "<!-- made by make format -->\n", "<!-- end -->\n"

if __name__ == "__main__":
    page = Path(sys.argv[1])
    before, _, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    found, _, after = rest.partition(_END)
    if sys.argv[2:] != ["--check"]:
        page.write_text(f"{before}{_BEGIN}{to_markdown()}{_END}{after}", encoding="utf-8")
    elif found != to_markdown():
        sys.exit(f"{page} is stale; run make format")
