"""The forms in which servers and programs write a secret, and a search for what is left of one."""

import base64
import html
import json
from array import array
from urllib.parse import quote

KEY = 'sk-Pro/ab+cd_EF%41&<"-0123456789xyz/ABC=='
"""An API key with characters that JSON, URLs, HTML and base64 write in other ways."""
_LEFT = 10
"""Characters of a form from which on a secret counts as leaked."""


def forms_of(secret: str) -> dict[str, str]:
    """Return what servers and programs write for a secret."""
    raw = secret.encode()
    codes = {
        f"{kind} {before}": encode(b"xyz"[:before] + raw + b"q").decode()
        for kind, encode in (("base64", base64.b64encode), ("url-safe base64", base64.urlsafe_b64encode))
        for before in range(3)
    }
    return codes | {
        "plain": secret,
        "JSON": json.dumps(secret)[1:-1],
        "JSON with \\/": json.dumps(secret)[1:-1].replace("/", "\\/"),
        "JSON in JSON": json.dumps(json.dumps(secret)[1:-1])[1:-1],
        "JSON of code points": "".join(f"\\u{unit:04X}" for unit in array("H", secret.encode("utf-16-le"))),
        "base64 in JSON": base64.b64encode(raw).decode().replace("/", "\\/"),
        "percent": quote(secret, safe=""),
        "percent without /": quote(secret),
        "percent twice": quote(quote(secret, safe=""), safe=""),
        "all percent": "".join(f"%{byte:02x}" for byte in raw),
        "repr": repr(secret),
        "repr of bytes": repr(raw),
        "HTML": html.escape(secret),
        "hexadecimal": raw.hex().upper(),
    }


def leaked(text: str, secret: str = KEY) -> list[str]:
    """Return the pieces of a secret in a text, in any form."""
    return [
        form[at : at + _LEFT]
        for form in forms_of(secret).values()
        for at in range(max(1, len(form) - _LEFT + 1))
        if form[at : at + _LEFT] in text
    ]
