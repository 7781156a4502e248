"""A browser of the pages without a network: it keeps cookies, reads tables, and finds whatever a page must not hold."""

import asyncio
import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any

from starlette.testclient import TestClient

from ludic.app.show.web.answering import Answering
from ludic.app.show.web.security import Guard
from ludic.app.show.web.site import Site
from ludic.base.hosts import host_names
from ludic.root.root import Root

HOME = "http://127.0.0.1:8000"
_FORBIDDEN = {"iframe", "object", "embed", "base", "style", "img"}


class Page(HTMLParser):
    """A page, read as a browser reads it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__()
        self.status, self.text = status, text
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.rows: list[list[str]] = []
        """Texts of the cells of all tables."""
        self.said: dict[str, str] = {}
        """All texts of elements with a role or a class, joined, such as those of alerts."""
        self._now = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.elements.append((tag, given))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self._now = given.get("role") or given.get("class") or tag

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()
        self.said[self._now] = self.said.get(self._now, "") + data

    def links(self) -> dict[str, str]:
        """Addresses of links; the keys are the addresses, since texts repeat."""
        return {given["href"]: tag for tag, given in self.elements if tag == "a" and "href" in given}

    def check(self) -> None:
        """Fail if a text of a run became markup, or could reach out of the page."""
        for tag, given in self.elements:
            assert tag not in _FORBIDDEN, tag
            assert not [name for name in given if name.startswith("on") or name == "style"], (tag, given)
            for name in ("href", "src", "action", "data-src"):
                assert given.get(name, "/").startswith(("/", "#")), (tag, given)
                assert not given.get(name, "/").startswith("//"), (tag, given)
                assert "token" not in given.get(name, ""), (tag, given)
            assert tag != "script" or given["src"].startswith("/static/"), given
        assert not [each for each in self.text if each < " " and each not in "\n\t\r"]


@dataclass
class Browser:
    """A browser that has exchanged the token, and the tokens that the command printed."""

    client: TestClient
    site: Site
    tokens: Sequence[str]

    def get(self, path: str, **options: Any) -> Page:
        answer = self.client.get(path, **options)
        page = Page(answer.status_code, answer.text)
        page.check()
        return page

    def json(self, path: str) -> Any:
        answer = self.client.get(path, headers={"Accept": "application/json"})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def csv(self, path: str) -> list[list[str]]:
        answer = self.client.get(path)
        assert answer.headers["content-type"].startswith("text/csv"), answer.text
        return list(csv.reader(io.StringIO(answer.text)))


@contextmanager
def browsing(shown: Root | str, *, is_in: bool = True, **options: Any) -> Iterator[Browser]:
    """Serve a run, or a folder of runs, in this process. is_in: exchange the token for the cookie."""
    tokens: list[str] = []
    with Site(shown, **options) as site:
        guard = Guard(Answering(site, asyncio.Event()).app, host_names("127.0.0.1"), tokens.append)
        with TestClient(guard, base_url=HOME, follow_redirects=False) as client:
            if is_in:
                assert client.get(f"/?token={tokens[0]}").status_code == 303
            yield Browser(client, site, tokens)
