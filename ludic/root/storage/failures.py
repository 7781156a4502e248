"""Retry filesystem operations that fail for a transient reason, and explain other failures with cause and advice.

Reads no file. Recognizes the errors of the operating system, botocore (s3fs), aiohttp and Google (gcsfs), Azure (adlfs)
and obstore by their attributes and texts alone, so that none of these packages needs to be installed.
"""

import errno
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_before_delay,
    stop_when_event_set,
    wait_random_exponential,
)

from ludic.base import mask
from ludic.errors import ConfigError, LudicError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

RETRY_LIMIT = "LUDIC_RETRY_S"
"""Environment variable: seconds for which a failed operation is retried; 0 disables retries."""
_DEFAULT_RETRY_S = 30.0
FIRST_WAIT_S = 0.2
"""Maximum seconds to wait after the first failure; doubles with each failure, up to `_LONGEST_WAIT_S`."""
_LONGEST_WAIT_S = 8.0
_SILENT_ATTEMPTS = 2
"""Number of first failures that are not logged."""

_TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504}
_UNREACHABLE = "Unreachable"
"""ludic's code for a request without a response, which obstore reports only in its message."""
_TRANSIENT_CODES = {
    "SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests", "ServerBusy",
    "InternalError", "ServiceUnavailable", "RequestTimeout", "ConditionalRequestConflict", "OperationAborted",
    "NoSuchUpload", _UNREACHABLE,
}  # fmt: skip
"""Transient error codes of S3 and Azure. ConditionalRequestConflict: another put-if-absent of the same key was in
progress. NoSuchUpload: the answer to the end of a multipart upload was lost, and s3fs found nothing to abort."""
_TRANSIENT_NAMES = re.compile(
    r"Timeout|Connection|Connector|Disconnected|HTTPClientError|Payload|IncompleteRead|ChunkedEncoding|ResponseParser"
    r"|ServiceRequestError|ServiceResponseError|TransportError|ClientOSError"
)
"""Names of HTTP clients' error classes for lost connections that are not TimeoutError or ConnectionError."""
_CLIENTS = {
    "aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "httpcore", "httpcore2", "httpx", "httpx2",
    "huggingface_hub", "obstore", "requests", "urllib3",
}  # fmt: skip

_STATUS_TEXT = re.compile(r"status code: (\d{3})")
_CODE_TEXT = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE_TEXT = re.compile(r"<Message>([^<]*)</Message>")
_REQUEST = re.compile(r"Error performing \w+ (https?://[^/\s]+)")
_UNANSWERED = re.compile(r"\bkind: (Connect|Timeout|Request|Interrupted|Decode)\b")
_REASON = re.compile(r'\b(?:message|error): "([^"]+)"')
_ERRNO = re.compile(r"^\[Errno \d+\] ")
_REDIRECT = "Received redirect without LOCATION"


@dataclass(frozen=True, slots=True)
class FilesystemFailure:
    """A filesystem's error, in terms common to all filesystems."""

    said: str = field(repr=False)
    """The error's message, which may hold secrets."""
    code: str
    """S3's or Azure's error code, a name from errno, or the name of the error's class."""
    status: int | None = None
    """HTTP status; None if there is none."""

    @property
    def cause(self) -> str:
        """The message on one line, without secrets.

        Computed on first access: most failures are files that do not exist yet, and their messages are never read.
        """
        text = " ".join(mask(self.said).split("\n\n")[0].split()).rstrip(".")
        return text if len(text) <= 400 else f"{text[:400]}..."

    @property
    def is_missing_bucket(self) -> bool:
        return self.code in {"NoSuchBucket", "ContainerNotFound"}


def diagnose(error: BaseException) -> FilesystemFailure:
    """Describe the first error in the chain of causes with a known status or code, else the error itself."""
    for link in _chain(error):
        failure = _from_response(link) or _from_text(link) or _from_status(link)
        if failure is not None:
            return failure
    code = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
    return FilesystemFailure(f"{type(error).__name__}: {_ERRNO.sub('', str(error))}", code)


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed: after throttling, an overloaded server, a timeout or a lost connection."""
    if isinstance(error, LudicError | FileExistsError):
        return False
    failure = diagnose(error)
    if failure.status is not None or failure.code in _TRANSIENT_CODES:
        return failure.status in _TRANSIENT_STATUS or failure.code in _TRANSIENT_CODES
    if isinstance(error, FileNotFoundError | PermissionError):
        return False
    return any(_is_lost_connection(link) for link in _chain(error))


def is_filesystem_error(error: BaseException) -> bool:
    """Return whether a filesystem raised the error; errors of HTTP clients are not OSErrors."""
    known = isinstance(error, OSError | NotImplementedError)
    return known or any(type(link).__module__.split(".")[0] in _CLIENTS for link in _chain(error))


def is_refused_overwrite(error: BaseException) -> bool:
    """Return whether a put-if-absent failed because its name is taken: FileExistsError or HTTP status 412."""
    if isinstance(error, FileExistsError):
        return True
    failure = diagnose(error)
    return failure.status == 412 or failure.code == "PreconditionFailed"


def explain(error: BaseException, where: str, *, writing: bool) -> str:
    """Return the file's URL, the cause and advice, on one line without secrets."""
    failure = diagnose(error)
    if writing and "://" in where and isinstance(error, FileNotFoundError):
        failure = replace(failure, code="NoSuchBucket")
    advice = _advice(failure, where, "write to" if writing else "read")
    if advice is None and is_transient(error):
        tried = f"retried for {limit_s:g} s ({RETRY_LIMIT}); " if (limit_s := retry_limit_s()) else ""
        advice = f"{tried}check the network and the endpoint{' (AWS_ENDPOINT_URL)' * where.startswith('s3')}"
    cause = failure.cause.removesuffix(f": '{where}'")
    return f"{where}: {cause}; {advice}" if advice else f"{where}: {cause}"


def retry_limit_s() -> float:
    """Return the limit in seconds from RETRY_LIMIT. Raises ConfigError if it is not a number."""
    text = os.environ.get(RETRY_LIMIT, str(_DEFAULT_RETRY_S))
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{RETRY_LIMIT} is {text!r}, wanted a number of seconds; 0 disables retries") from None


def retried(operation: Callable[[], Result], where: str, stop: threading.Event | None = None) -> Result:
    """Return the result of an operation; retry it for `retry_limit_s` while its failures are transient.

    Raises the last failure. Setting `stop` ends the waiting at once.
    """
    limit_s = retry_limit_s()
    try:
        return operation()  # most succeed, and opening a local file takes a tenth of the time of building a Retrying
    except Exception as error:
        if not is_transient(error):
            raise
        failures = [error]
    stop = stop or threading.Event()
    retrying = Retrying(
        retry=retry_if_exception(is_transient),
        wait=wait_random_exponential(multiplier=FIRST_WAIT_S, max=_LONGEST_WAIT_S),
        stop=stop_before_delay(limit_s) | stop_when_event_set(stop),
        sleep=sleep_using_event(stop),
        before_sleep=_log_wait(where),
        reraise=True,
    )

    def try_again() -> Result:
        if failures:
            raise failures.pop()  # the failure above counts as the first attempt
        return operation()

    return retrying(try_again)


def _log_wait(where: str) -> Callable[[RetryCallState], None]:
    def log(state: RetryCallState) -> None:
        assert state.outcome is not None
        error = state.outcome.exception()
        if error is not None and state.attempt_number > _SILENT_ATTEMPTS:
            logger.warning("%s: %s; trying again", where, diagnose(error).cause)

    return log


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__ or error.__context__


def _from_response(error: BaseException) -> FilesystemFailure | None:
    """Parse botocore's ClientError, which is the cause of s3fs's errors."""
    response = getattr(error, "response", None)
    if not isinstance(response, Mapping) or "Error" not in response:
        return None
    details, meta = response["Error"], response.get("ResponseMetadata", {})
    return _failure(details.get("Code", ""), details.get("Message", ""), meta.get("HTTPStatusCode"))


def _from_text(error: BaseException) -> FilesystemFailure | None:
    """Parse obstore's errors, whose text holds the server's answer and much else."""
    text = str(error)
    if "Error performing" not in text:
        return None
    if status := _STATUS_TEXT.search(text):
        code, message = _CODE_TEXT.search(text), _MESSAGE_TEXT.search(text)
        return _failure(code[1] if code else "", message[1] if message else "", int(status[1]))
    if _REDIRECT in text:
        return _failure("PermanentRedirect", "", 301)
    # Two searches are faster: a joint pattern would search for the kind after each request of a long text.
    request = _REQUEST.search(text)
    if request and (unanswered := _UNANSWERED.search(text, request.end())):
        reason = _REASON.search(text)
        said = reason[1] if reason else {"Timeout": "time-out"}.get(unanswered[1], "connection lost")
        return FilesystemFailure(f"no answer from {request[1]}: {said}", _UNREACHABLE)
    return None


def _from_status(error: BaseException) -> FilesystemFailure | None:
    """Parse errors of aiohttp (status), Azure (status_code, error_code) and gcsfs (code)."""
    if type(error).__module__.split(".")[0] not in _CLIENTS:
        return None
    for name in ("status", "status_code", "code"):
        status = getattr(error, name, None)
        if str(status).isdecimal():
            code = str(getattr(error, "error_code", None) or "")
            return _failure(code, str(getattr(error, "message", "") or error), int(str(status)))
    return None


def _failure(code: str, message: str, status: int | None) -> FilesystemFailure:
    if code.isdecimal():  # the answer to a HEAD has no body, so botocore's code is the status
        status, code, message = int(code), "", message if message != "Forbidden" else ""
    known = f"{code} (HTTP {status})" if code and status else code or f"HTTP {status}"
    return FilesystemFailure(f"{known}: {message}" if message else known, code, status)


def _is_lost_connection(error: BaseException) -> bool:
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    if type(error).__module__.split(".")[0] not in _CLIENTS:
        return False
    return bool(_TRANSIENT_NAMES.search(type(error).__name__))


_ADVICE: Mapping[frozenset[str], str] = {
    frozenset({"NoSuchBucket", "ContainerNotFound"}): "create bucket {bucket}, or correct the URL or the endpoint",
    frozenset({"AccessDenied", "AllAccessDisabled", "AuthorizationPermissionMismatch", "403"}): (
        "these credentials may not {act} bucket {bucket}: get the permission, or use other credentials (AWS_PROFILE)"
    ),
    frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthenticationFailed", "InvalidToken", "401"}): (
        "the credentials are wrong: check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE in ~/.aws"
    ),
    frozenset({"ExpiredToken", "TokenRefreshRequired"}): "the credentials have expired: log in again",
    frozenset({"RequestTimeTooSkewed"}): "this machine's clock is wrong: set it",
    frozenset({"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"}): (
        "set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role"
    ),
    frozenset({"NoRegionError"}): "set AWS_DEFAULT_REGION to the region of bucket {bucket}",
    frozenset(
        {"PermanentRedirect", "Redirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301"}
    ): "bucket {bucket} is in another region: set AWS_DEFAULT_REGION, and no AWS_ENDPOINT_URL of another one",
    frozenset({"ENOSPC", "EDQUOT"}): "the disk or the quota is full: free some space, or choose another root",
    frozenset({"EFBIG"}): "the file is larger than this process may write (ulimit -f) or the disk can hold",
    frozenset({"EROFS"}): "the disk is mounted read-only: mount it for writing, or choose another root",
    frozenset(
        {"EACCES", "EPERM"}
    ): "this user may not {act} the folder: check its owner and mode, or choose another root",
    frozenset({"ENOTDIR"}): "a file is in the place of a folder: move it away, or choose another root",
    frozenset({"EISDIR"}): "a folder is in the place of a file: move it away, or choose another root",
    frozenset({"EOPNOTSUPP", "ENOTSUP"}): "without put-if-absent files would be overwritten: choose another disk",
    frozenset({"EMFILE", "ENFILE"}): "too many files are open: raise `ulimit -n`",
}


def _advice(failure: FilesystemFailure, where: str, act: str) -> str | None:
    bucket = where.partition("://")[2].partition("/")[0]
    for codes, advice in _ADVICE.items():
        if failure.code in codes or (not failure.code and str(failure.status) in codes):
            return advice.format(bucket=bucket, act=act)
    return None
