"""Make texts safe to print on a terminal and to store as UTF-8."""

import logging
import re

from ludic.base.masking import mask

# Line breaks and tabs are layout. Other characters of C0 and C1 could move the cursor or rename the window. Characters
# that change the direction of writing, line separators and invisible tags could disguise the text.
CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)


def storable(text: str) -> str:
    """Replace half characters, which "\\ud800" in JSON gives and UTF-8 can't hold, by question marks."""
    return text.encode(errors="replace").decode()


def shortened(text: str, most: int | None) -> tuple[str, int]:
    """Return the first `most` characters of a text, which then ends with the number of cut ones, and that number; None
    cuts none."""
    num_cut = 0 if most is None else max(0, len(text) - most)
    return (f"{text[:most]}\n[cut: {num_cut:,} more characters]" if num_cut else text), num_cut


def left_out(text: str, most: int) -> str:
    """Replace the middle of a text longer than `most` characters by the number of omitted characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters left out … {text[len(text) - half :]}"


def printable(text: str) -> str:
    """Return the text with its control characters, and those that hide or reorder text, spelt out."""
    return CONTROL.sub(lambda match: _spell(ord(match[0])), text)


def _spell(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def log_handler() -> logging.Handler:
    """Return a handler that shows records on stderr, each with its time."""
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter("%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
    return handler


class _PrintableFormatter(logging.Formatter):
    """Escapes control characters, which names in a root may contain, and masks secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(mask(super().format(record)))
