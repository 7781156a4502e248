"""Call code that is not ludic's so that its mistakes fail one episode and never the worker."""

from collections.abc import Iterator
from contextlib import contextmanager

from ludic.printable import storable
from ludic.user_code import describe, exit_is_an_error


class EpisodeFailedError(Exception):
    """An environment, a parser or a context raised an error, or returned what can't be stored; the text says which."""


@contextmanager
def fails_the_episode(unless: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raise EpisodeFailedError for an error in the block, and for an exit; its text is one line that UTF-8 can hold.

    unless: errors that pass as they are, besides EpisodeFailedError and LimitReachedError.
    """
    try:
        with exit_is_an_error():
            yield
    except (EpisodeFailedError, LimitReachedError):
        raise
    except unless:
        raise
    except Exception as error:
        raise EpisodeFailedError(storable(describe(error))) from error


class LimitReachedError(Exception):
    """A limit ends the episode."""

    def __init__(self, reason: str, message: str) -> None:
        """reason: truncation reason of the rows."""
        super().__init__(message)
        self.reason = reason
