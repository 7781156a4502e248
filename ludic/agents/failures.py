"""Call code that is not ludic's so that its mistakes fail one episode and never the worker."""

from types import TracebackType

from ludic.code.run import as_error, describe
from ludic.errors import ConfigError, EngineError, ModelError
from ludic.printable import storable

ENGINE_ERRORS = (ModelError, ConfigError, EngineError)
"""Errors of an engine, which end the worker; no agent reads them, and no episode fails by them."""


class EpisodeFailedError(Exception):
    """An environment, a parser or a context raised an error, or returned what can't be stored; the text says which."""


class LimitReachedError(Exception):
    """A limit ends the episode."""

    def __init__(self, reason: str, message: str) -> None:
        """reason: truncation reason of the rows."""
        super().__init__(message)
        self.reason = reason


class fails_the_episode:  # noqa: N801
    """Raise EpisodeFailedError for what the block raises, see `as_error`; its text is one line that UTF-8 can hold.

    An episode enters about ten of these, and a generator would cost three times as much.
    """

    __slots__ = ("_passing",)

    def __init__(self, unless: tuple[type[Exception], ...] = ()) -> None:
        """unless: errors that pass as they are, besides EpisodeFailedError and LimitReachedError."""
        self._passing = (EpisodeFailedError, LimitReachedError, *unless)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = None if error is None else as_error(error, in_coroutine=True)
        if failure is not None and not isinstance(failure, self._passing):
            raise EpisodeFailedError(storable(describe(failure))) from failure
