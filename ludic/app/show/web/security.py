"""Keep other people, and other web pages, away from the pages of `ludic view --web`.

The machine may be shared, such as a login node, and any web page that the user visits may send requests to it. So:

- A token, which the command prints, is exchanged once for a cookie; then the command prints another token. The cookie
  is HttpOnly and SameSite=Strict; addresses hold no token after that, and are never logged.
- A request must name this machine as its Host; otherwise a page whose name leads to this machine (DNS rebinding) could
  read the answers. An Origin must be that of the request; a POST request must have one.
- The policy of each answer allows the site's own scripts, styles and requests, and forbids frames, inline scripts and
  other servers.
"""

import hmac
import secrets
from collections.abc import Awaitable, Callable, Collection, MutableMapping, Sequence
from html import escape
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from ludic.base import host_of

Scope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

TOKEN = "token"
"""Name of the token in an address."""
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not no-referrer: with it, browsers send forms of the page itself with the Origin null, which is refused.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_NO_STORE = "no-store"
_WITHOUT_COOKIE = """<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>ludic view</title>
<h1>This browser has no access yet</h1>
<form action="{path}">{fields}
<p><label>The token that <code>ludic view --web</code> printed last, or its whole address; each works once:
<input name="{token}" size="60" autocomplete="off" spellcheck="false" required autofocus></label>
<button>Open</button></p></form>
<p>If this browser had access, and a link of another site led here, <a href="{here}">follow it again from here</a>.</p>
"""


class Guard:
    """An ASGI app that lets only requests of the user's own browsers through to another one."""

    def __init__(self, app: App, names: Collection[str], on_token: Callable[[str], None]) -> None:
        """names: of this machine. on_token: called with each new token, first with the first one."""
        self._app, self._names, self._on_token = app, names, on_token
        self._cookie = secrets.token_urlsafe(32)
        """Value of the cookie of all browsers; it lives as long as this process."""
        self._new_token()

    def _new_token(self) -> None:
        self._token = secrets.token_urlsafe(24)
        self._on_token(self._token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refusal(scope, headers)
        has_cookie = self._has_cookie(scope, headers)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = dict(query).get(TOKEN)
        token = None if given is None else given.strip().rpartition(f"{TOKEN}=")[2]  # of a whole address
        if refusal is not None:
            await _answer(send, 403, refusal)
        elif has_cookie and token is None:
            # Files of the package are asked for again, and are answered with 304.
            caching = "no-cache" if scope["path"].startswith("/static/") else _NO_STORE
            await self._app(scope, receive, _with_headers(send, caching))
        else:
            is_get = scope["method"] == "GET"
            is_new = is_get and token is not None and hmac.compare_digest(token.encode(), self._token.encode())
            clean = _clean_address(scope["path"], query)
            if is_new or (is_get and has_cookie):
                cookie = f"{self._cookie_name(scope)}={self._cookie}; Path=/; HttpOnly; SameSite=Strict"
                await _answer(send, 303, "", location=clean, set_cookie=cookie)
            else:
                await _answer(send, 401, _without_cookie(scope["path"], query), "text/html")
            if is_new:
                self._new_token()

    def _refusal(self, scope: Scope, headers: MutableMapping[str, str]) -> str | None:
        """Return why a request is refused, or None."""
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD", "POST"):
            return "the viewer answers GET and POST requests only"
        host = headers.get("host", "")
        name = host_of(f"//{host}")
        own_address = scope["server"][0] if scope.get("server") else None
        if name is None or name not in {*self._names, own_address}:
            return "the viewer answers requests for this machine only; --host-names adds a name of it"
        origin = headers.get("origin")
        is_own = origin is not None and host_of(origin) == name and urlsplit(origin).netloc == host
        if not is_own and (origin is not None or scope["method"] == "POST"):
            return "the viewer answers its own page only"
        return None

    def _has_cookie(self, scope: Scope, headers: MutableMapping[str, str]) -> bool:
        # http.cookies drops all cookies if one is odd, and a browser sends those of all programs of this machine.
        name = self._cookie_name(scope)
        pairs = [each.strip().partition("=") for each in headers.get("cookie", "").split(";")]
        return any(
            given == name and hmac.compare_digest(value.encode(), self._cookie.encode()) for given, _, value in pairs
        )

    @staticmethod
    def _cookie_name(scope: Scope) -> str:
        # A browser sends a cookie to all ports of a host.
        return f"ludic_view_{scope['server'][1] if scope.get('server') else 0}"


def _clean_address(path: str, query: Sequence[tuple[str, str]]) -> str:
    """Return an address of this site without the token."""
    # "//host" would be an address of another server.
    rest = urlencode([(name, value) for name, value in query if name != TOKEN])
    return "/" + quote(path.lstrip("/"), safe="/") + (f"?{rest}" if rest else "")


def _without_cookie(path: str, query: Sequence[tuple[str, str]]) -> str:
    """Return a page that asks for a token, and then leads to the address that was asked for."""
    fields = "".join(
        f'<input type="hidden" name="{escape(name)}" value="{escape(value)}">' for name, value in query if name != TOKEN
    )
    here, action = escape(_clean_address(path, query)), escape(_clean_address(path, []))
    return _WITHOUT_COOKIE.format(here=here, path=action, fields=fields, token=TOKEN)


async def _answer(send: Send, status: int, text: str, kind: str = "text/plain", **headers: str) -> None:
    named = {"Content-Type": f"{kind}; charset=utf-8", **{name.replace("_", "-"): it for name, it in headers.items()}}
    encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in named.items()]
    await _with_headers(send)({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": text.encode()})


def _with_headers(send: Send, caching: str = _NO_STORE) -> Send:
    """Add the policy to an answer, and whether browsers may store it."""

    async def add(message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            more = {**_HEADERS, "Cache-Control": caching}
            added = [(name.lower().encode(), value.encode()) for name, value in more.items()]
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return add
