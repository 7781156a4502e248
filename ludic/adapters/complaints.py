"""Say what an adapter could not record of another trainer: in warnings, one a minute at most, and in reasons."""

import logging
import time
from dataclasses import dataclass

from ludic.errors import LudicError

logger = logging.getLogger("ludic.record")

_EVERY_S = 60.0


@dataclass(slots=True)
class Complaints:
    """Warnings of one recorder. Not safe from several threads: one may then be said twice."""

    root: str
    said_s: float = -_EVERY_S
    num_unsaid: int = 0

    def warn(self, what: str) -> None:
        """Log a warning, or count it if there was one in the last minute."""
        now = time.monotonic()
        if now - self.said_s < _EVERY_S:
            self.num_unsaid += 1
            return
        more = f" ({self.num_unsaid:,} more in the minute before)" if self.num_unsaid else ""
        logger.warning("%s: %s%s", self.root, what, more)
        self.said_s, self.num_unsaid = now, 0


def reason_of(error: Exception) -> str:
    """Return why something is not recorded; an error that is not ludic's own also by its type."""
    return str(error) if isinstance(error, LudicError) else f"{type(error).__name__}: {error}"
