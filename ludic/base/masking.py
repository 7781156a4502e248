"""Mask secrets in texts that leave the process: errors, logs, stored failures.

Known secrets are the values of `VARIABLES`, those of other environment variables with a name that ends as one of
`ENDINGS`, and those passed to `keep_secret`. `mask` finds them, and parts of them, in the forms that servers and
programs write: unchanged; with the escapes of JSON (\\/, \\u0041, also of JSON within JSON), repr, percent-encoding and
HTML; in base64 of both alphabets, at each of three alignments; in hexadecimal. Unknown secrets are found by their
context, such as `Bearer ` or user and password in a URL.

Mask a text before it is cut or quoted, since half a secret may not be found. A server can hide a secret on purpose, for
example reversed.

Texts come from models and servers, and may be long: each search takes time in proportion to the text.
"""

import base64
import html
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

MASK = "***"
SERVER_LOGIN = "LUDIC_SERVER_LOGIN"
"""Environment variable: user:password of the vLLM servers, or of the proxy before them."""
VARIABLES = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "HF_TOKEN",
    "LUDIC_GATEWAY_KEY",
    SERVER_LOGIN,
    "LUDIC_UPSTREAM_KEY",
    "VLLM_API_KEY",
    "WANDB_API_KEY",
)
"""Environment variables whose values are masked, if they have at least `_SHORTEST_VARIABLE` characters."""
ENDINGS = ("_API_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
"""Ends of the names of other variables whose values are masked, if they have at least `_SHORTEST_WITH_PARTS`
characters: environments and judges of users read keys that ludic does not know, such as OPENAI_API_KEY."""
SECRET_NAME = re.compile(r"key|token$|secret|passw|credential", re.IGNORECASE)
"""Matches the name of a setting that is likely to be a secret."""

_SHORTEST, _SHORTEST_VARIABLE = 4, 8
"""Characters of the shortest secrets; shorter ones would hide ordinary words and protect nothing."""
_SHORTEST_WITH_PARTS = 12
"""A secret of fewer characters is found only as a whole, since its parts may be ordinary words."""

_TABLE = 1 << 18
"""Size of a table of parts' first bytes: of 100,000 other bytes a handful are looked at twice."""
_PIECE = 1 << 13
"""Bytes that are searched for parts at a time."""

_given: set[str] = set()

_AROUND = re.compile(
    r"(?i)\b(?:AKIA|ASIA)[A-Z0-9]{8,}\b"
    r"|\bhf_[A-Z0-9]{20,}\b"
    r"|\bsk-ludic-[\w-]{32,}"
    r"|(?<=://)[^/@\s]+(?=@)"
    r"|(?<=Bearer )[^\s'\"<>]+"
    r"|(?<=[?&;\s])(?:[\w-]*(?:signature|credential|secret|token|accesskeyid|accountkey|password)|sig)=[^&;\s'\"]+"
)
_SIGNS = ("akia", "asia", "hf_", "sk-ludic-", "bearer ")
_FIELDS = ("signature=", "credential=", "secret=", "token=", "accesskeyid=", "accountkey=", "password=", "sig=")
"""One of these is in each text that _AROUND matches, in lower case, unless it is a URL with a user."""
_FIELD = re.compile(
    r"(?i)(?P<before>\b\w{0,40}?(?:key|token|secret|passw|credential)\w{0,40}['\"]?\s*[=:]\s*[rbu]?(?P<quote>['\"]))"
    r"(?:\\.|(?!(?P=quote))[^\\])*(?P=quote)"
)
"""Matches a quoted value after the name of a secret, as dataclasses and dictionaries print it."""
_WORD = re.compile(r"[^@\s'\"]+@?")
_PASSWORD = re.compile(r"(?<=://)[^/?#:@\s'\"]*:(?!\d*(?:[/?#\s]|$))")
"""Matches the user before a password in a URL, but not a host before its port; a password may hold a slash."""
_ESCAPE = re.compile(
    r"\\+u(?P<pair>[dD][89abAB][0-9a-fA-F]{2}\\+u[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|\\+u(?P<code>[0-9a-fA-F]{4})"
    r"|\\+U(?P<long>000[0-9a-fA-F]{5}|0010[0-9a-fA-F]{4})"
    r"|(?:\\+x|%(?:25)*)(?P<byte>[0-9a-fA-F]{2})"
    r"|(?P<entity>&(?:#\w{1,8}|\w{2,6});)"
    r"|\\+(?P<plain>.)"
    r"|(?P<other>[^\x00-\x7f])",
    re.DOTALL,
)
_MAY_ESCAPE = re.compile(r"[\\%&\x80-\U0010ffff]")
_URL = re.compile(r"[A-Za-z][\w+.:-]*://")
_USER = re.compile(r"://[^/?#]*@(?!\d+$)")
"""Matches a user; but not bucket@57, a version of a run."""
_USER_AND_COLON = re.compile(r"://[^/?#:@]*:(?!\d*(?:[/?#]|$))")
"""Matches the user before a password, which ends at the next @ and may hold a slash."""
_SECRET_IN_QUERY = re.compile(r"(?i)[?&#][^=&?#]*(sig|signature|credential|secret|token|key|password)=")
_PLAIN_BASE64 = bytes.maketrans(b"-_", b"+/")


def keep_secret(secret: str) -> str:
    """Let `mask` hide a secret from now on; returns it."""
    if len(secret) >= _SHORTEST:
        _given.add(secret)
    return secret


def mask(text: str) -> str:
    """Return the text with *** in the place of secrets."""
    return _mask(text, _secrets())


def mask_values(values: Any) -> Any:
    """Return JSON values with secrets masked in every text and key; tuples may become lists.

    All texts are searched together first, which for many short ones takes a tenth of the time of `mask`.
    """
    texts, secrets = list(_texts(values)), _secrets()
    joined = "\n".join(texts)
    return _mask_values(values, secrets) if _may_show(joined) or _may_hold(joined, secrets) else values


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield str(key)
            yield from _texts(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _texts(value)


def _may_show(text: str) -> bool:
    """Return False if nothing looks like the surroundings of a secret; `_AROUND` takes ten times as long."""
    lower = text.lower()
    has_field = "=" in text and any(each in lower for each in _FIELDS)
    return has_field or any(each in lower for each in _SIGNS) or ("://" in text and "@" in text)


def _mask_values(values: Any, secrets: frozenset[str]) -> Any:
    if isinstance(values, str):
        return _mask(values, secrets)
    if isinstance(values, Mapping):
        return {_mask(str(key), secrets): _mask_values(each, secrets) for key, each in values.items()}
    return [_mask_values(each, secrets) for each in values] if isinstance(values, list | tuple) else values


def _mask(text: str, secrets: frozenset[str]) -> str:
    if len(text) < _SHORTEST:
        return text
    pieces, end = [], 0
    for start, stop in _known(text, secrets):
        pieces += [text[end:start], MASK]
        end = stop
    found = "".join([*pieces, text[end:]])
    return _AROUND.sub(MASK, _without_passwords(found)) if _may_show(found) else found


def has_secret(url: str) -> bool:
    """Return whether a text is a URL with a user, a password or a key; other texts have none."""
    if not _URL.match(url):
        return False
    login = _USER_AND_COLON.search(url)
    has_password = login is not None and "@" in url[login.end() :]
    return has_password or bool(_USER.search(url) or _SECRET_IN_QUERY.search(url))


def public_url(url: str) -> str:
    """Return a URL without user, password, query and fragment. The last @ counts: a password may hold a slash."""
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{re.split('[?#]', rest.rpartition('@')[2])[0]}"


def secrets_of(values: Any, name: str = "") -> Iterator[str]:
    """Yield the names of settings that hold a secret, by their own names, or as a URL. values: as for JSON."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from secrets_of(value, str(key))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from secrets_of(value, name)
    elif isinstance(values, str) and values and (SECRET_NAME.search(name) or has_secret(values)):
        yield name


def public_values(values: Any, name: str = "") -> Any:
    """Return settings without secrets, in any depth; mappings become dictionaries, tuples lists. name: of `values`."""
    if isinstance(values, Mapping):
        return {str(key): public_values(each, str(key)) for key, each in values.items()}
    if isinstance(values, list | tuple):
        return [public_values(each, name) for each in values]
    if values is None or isinstance(values, bool | int | float):
        return values
    if SECRET_NAME.search(name):
        return MASK
    return mask(values) if isinstance(values, str) else values


def mask_fields(text: str) -> str:
    """Mask the text of an object, such as Arguments(hub_token='hf_...'), also quoted values of names of secrets."""
    return mask(_FIELD.sub(lambda found: f"{found['before']}{MASK}{found['quote']}", text))


def _without_passwords(text: str) -> str:
    """Return the text with *** in the place of user and password in URLs.

    A pattern of a whole login would search from each "://" for an "@" that may be far away or missing. So each word up
    to its "@" is searched only once.
    """

    def masked(word: re.Match[str]) -> str:
        login = _PASSWORD.search(word[0]) if word[0].endswith("@") else None
        return word[0] if login is None else f"{word[0][: login.start()]}{MASK}@"

    return _WORD.sub(masked, text) if "://" in text else text


def _secrets() -> frozenset[str]:
    """Return the secrets that are known. Reads the environment each time: variables may be set after the import."""
    lengths = {
        name: _SHORTEST_VARIABLE if name in VARIABLES else _SHORTEST_WITH_PARTS
        for name in os.environ
        if name in VARIABLES or name.endswith(ENDINGS)
    }
    texts = [value for name, size in lengths.items() if len(value := os.environ.get(name, "").strip()) >= size]
    password = os.environ.get(SERVER_LOGIN, "").partition(":")[2]
    return frozenset({*texts, *([password] if len(password) >= _SHORTEST else []), *_given})


def _known(text: str, secrets: frozenset[str]) -> list[tuple[int, int]]:
    """Return where known secrets and their parts begin and end, in order and without overlaps."""
    parts = _parts(secrets) if secrets else ()
    if not parts or not _may_hold(text, secrets):
        return []
    data, starts, ends = _decode(text)
    forms = {"plain": data, "base64": data.translate(_PLAIN_BASE64), "hex": data.lower()}
    found: list[tuple[int, int]] = []
    for form, size, wanted in parts:
        searched = forms[form]
        begins = [at for at in range(len(searched) - size + 1) if searched[at : at + size] in wanted]
        found += [(starts[at], ends[at + size - 1]) for at in begins]
    merged: list[tuple[int, int]] = []
    for start, end in sorted(found):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _may_hold(text: str, secrets: frozenset[str]) -> bool:
    """Return False if no part of a secret is in the text, in some hundredths of the time of finding the parts."""
    if not secrets:
        return False
    data = _unescaped(text)
    forms = {"plain": data, "base64": data.translate(_PLAIN_BASE64), "hex": data.lower()}
    # By pieces that stay in the processor's cache.
    return any(
        _holds_any(forms[form][at : at + _PIECE + _SHORTEST], begins)
        for form, begins in _begins(secrets).items()
        for at in range(0, len(forms[form]), _PIECE)
    )


def _holds_any(data: bytes, begins: "tuple[np.ndarray, Set[int]]") -> bool:
    codes, (table, wanted) = _codes(data), begins
    return not wanted.isdisjoint(codes[table[codes & (len(table) - 1)]].tolist())


def _codes(data: bytes) -> "np.ndarray":
    """Return the number of each _SHORTEST neighbouring bytes, mixed so that their low bits differ: (n - 3,) uint32."""
    import numpy as np  # takes a tenth of a second, and most commands know no secret

    values = np.frombuffer(data, np.uint8).astype(np.uint32)
    codes = values[3:] | (values[2:-1] << 8) | (values[1:-2] << 16) | (values[:-3] << 24)
    return (codes * np.uint32(0x9E3779B1)) ^ (codes >> np.uint32(15))


@lru_cache(maxsize=4)
def _begins(secrets: frozenset[str]) -> "Mapping[str, tuple[np.ndarray, Set[int]]]":
    """Return, by form, the codes of the first bytes of all parts, and a table of their low bits."""
    import numpy as np

    found: dict[str, tuple[np.ndarray, Set[int]]] = {}
    for form in {form for form, _, _ in _parts(secrets)}:
        parts = [part for of, _, wanted in _parts(secrets) if of == form for part in wanted]
        codes = _codes(b"".join(part[:_SHORTEST] for part in parts))[::_SHORTEST]
        table = np.zeros(_TABLE, np.bool_)
        table[codes & (_TABLE - 1)] = True
        found[form] = table, frozenset(codes.tolist())
    return found


@lru_cache(maxsize=4)
def _parts(secrets: frozenset[str]) -> tuple[tuple[str, int, Set[bytes]], ...]:
    """Return the parts to look for, by form and size in bytes."""
    found: dict[tuple[str, int], set[bytes]] = {}
    for secret in secrets:
        raw = secret.encode(errors="replace")
        size = max(6, min(8, len(raw) // 2)) if len(raw) >= _SHORTEST_WITH_PARTS else len(raw)
        for plain in (
            _decode(secret)[0],
            raw.replace(b"\\", b""),
        ):  # they differ if the secret looks escaped, like 100%41
            _add(found, "plain", plain, size)
        _add(found, "hex", raw.hex().encode(), 2 * size)
        for before in range(3):
            code = base64.b64encode(b"\0" * before + raw)
            # Without the characters that also depend on the bytes before and after.
            _add(found, "base64", code[(8 * before + 5) // 6 : 8 * (before + len(raw)) // 6], max(4, size * 4 // 3 - 1))
    return tuple((form, size, frozenset(wanted)) for (form, size), wanted in found.items())


def _add(found: dict[tuple[str, int], set[bytes]], form: str, whole: bytes, size: int) -> None:
    size = min(size, len(whole))
    if size >= _SHORTEST:
        found.setdefault((form, size), set()).update(whole[at : at + size] for at in range(len(whole) - size + 1))


def _unescaped(text: str) -> bytes:
    """Return the first of what `_decode` returns."""
    pieces, at = list[bytes](), 0
    for match in _escapes(text):
        pieces += [text[at : match.start()].encode(), _unescape(match)]
        at = match.end()
    return b"".join([*pieces, text[at:].encode()])


def _decode(text: str) -> tuple[bytes, list[int], list[int]]:
    """Return a text without escapes, as UTF-8, and where each of its bytes begins and ends in the text.

    Backslashes are left out, so that it does not matter how often they were escaped.
    """
    data, starts, ends, at = bytearray(), list[int](), list[int](), 0

    def add(piece: bytes, begins: Iterable[int], stops: Iterable[int]) -> None:
        data.extend(piece)
        starts.extend(begins)
        ends.extend(stops)

    for match in _escapes(text):
        start, end = match.span()
        add(text[at:start].encode(), range(at, start), range(at + 1, start + 1))
        piece = _unescape(match)
        add(piece, [start] * len(piece), [end] * len(piece))
        at = end
    add(text[at:].encode(), range(at, len(text)), range(at + 1, len(text) + 1))
    return bytes(data), starts, ends


def _escapes(text: str) -> Iterator[re.Match[str]]:
    """Yield the matches of _ESCAPE. It is tried only where one may begin, since it takes 100 ns at each other place."""
    at = 0
    while (begin := _MAY_ESCAPE.search(text, at)) is not None:
        match = _ESCAPE.match(text, begin.start())
        if match is not None:
            yield match
        at = begin.end() if match is None else match.end()


def _unescape(match: re.Match[str]) -> bytes:
    kind, found = match.lastgroup, match[match.lastgroup or 0]
    if kind == "byte":
        return bytes.fromhex(found)
    if kind == "pair":
        high, low = int(found[:4], 16), int(found[-4:], 16)
        return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)).encode()
    character = chr(int(found, 16)) if kind in ("code", "long") else html.unescape(found) if kind == "entity" else found
    return character.encode(errors="replace")
