"""From a request to a page: run its function in a thread, and turn what it returns into HTML, JSON or CSV.

The queries of a request end when its browser goes away, after a limit of seconds, and when the server ends. An error of
ludic becomes a page with that line; any other error is also logged, with its traceback.
"""

import asyncio
import hashlib
import io
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from importlib import resources
from itertools import islice
from typing import Any, TypeVar, cast
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ludic.app.show.figures import COLOURS, DARK_COLOURS
from ludic.app.show.html import spelt, templates
from ludic.app.show.lookup import UnknownIdError

# Modules of pages, which register themselves.
from ludic.app.show.web import (  # noqa: F401
    code,
    compare,
    episode,
    evaluations,
    example,
    lists,
    overview,
    rollout,
    several,
    sql_box,
    training,
)
from ludic.app.show.web.pages import PAGES, AnyAnswer, JsonAnswer, PageAnswer, PageRequest, PageTable, Redirect, menu
from ludic.app.show.web.site import Site
from ludic.base import Result, plain_rows, to_plain, write_csv
from ludic.base.printable import printable
from ludic.errors import ConfigError, LudicError, one_line

logger = logging.getLogger(__name__)

MOST_SECONDS = 30.0
"""Seconds after which the queries of a page end."""
_STOP_EVERY_S = 0.05
"""Seconds between interrupts of a query that nobody waits for; one that has not begun yet ignores them."""
_MOST_AT_ONCE = 8
"""Requests that run at the same time; others wait for their turn."""
_MOST_FORM_BYTES = 1 << 20
_ROWS_A_CHUNK = 1000
"""Rows of a CSV file that are sent at once."""
_CSV = "csv"
"""Parameter of an address with the name of a table to download."""

T = TypeVar("T")


class Answering:
    """Answers the requests for all registered pages; `app` is the ASGI app."""

    def __init__(self, site: Site, stopping: asyncio.Event) -> None:
        """stopping: set when the server ends."""
        self._site, self._stopping = site, stopping
        self._turns = asyncio.Semaphore(_MOST_AT_ONCE)
        static = StaticFiles(directory=str(resources.files("ludic.app.show.web").joinpath("static")))
        pages = [
            Route(path, self._answer, methods=["GET", "POST"]) for path in ("/", "/r/{label:path}/{page}", "/{page}")
        ]
        colours = Route("/colours.css", lambda _: Response(_colours(), media_type="text/css"))
        self.app = Starlette(routes=[Mount("/static", static), colours, *pages])

    async def _answer(self, request: Request) -> Response:
        label, name = request.path_params.get("label", ""), request.path_params.get("page")
        if name is None:
            return RedirectResponse(self._site.link("", self._site.first_page, {}), 303)
        try:
            page = await self._read(request, label, name)
        except LudicError as error:
            return _problem(request, error)
        limit_s = None if _CSV in request.query_params else MOST_SECONDS
        async with self._turns:
            return await self._in_thread(request, page, lambda: self._respond(request, page), limit_s)

    async def _read(self, request: Request, label: str, name: str) -> PageRequest:
        """Return the request as a page sees it. Raises UnknownIdError for a page that there is not."""
        page = PAGES.get(name)
        if page is None:
            raise UnknownIdError(f"there is no page {name!r}")
        if page.of_run and self._site.has_several != bool(label):
            raise UnknownIdError(f"{name} shows a run, and the address names none")
        if request.method == "POST" and not page.posts:
            raise ConfigError(f"{name} takes no POST request")
        return PageRequest(
            site=self._site,
            page=page,
            label=label,
            pairs=[pair for pair in request.query_params.multi_items() if pair[0] != _CSV],
            form=await _form(request) if request.method == "POST" else {},
        )

    def _respond(self, request: Request, page: PageRequest) -> Response:
        """Return the response to a request; runs in its thread."""
        try:
            if page.page.of_run:
                page.open(page.label)
        except LudicError as error:
            return _problem(request, error)
        try:
            answer = page.page.function(page)
            name = request.query_params.get(_CSV)
            if name is None:
                return _response(request, page, answer)
            table = _table_of(answer, name)
            chunks = _csv_chunks(page, table)
            first = next(chunks)  # here, where an error is still a page
        except LudicError as error:
            return _problem(request, error, page)
        except Exception as error:
            logger.exception("the page %s failed", page.page.name)
            problem = ConfigError(f"{page.page.name} failed by {type(error).__name__}; the command's output says where")
            return _problem(request, problem, page, status=500)
        disposition = f'attachment; filename="{page.page.name}-{table.name}.csv"'
        return StreamingResponse(
            self._stream(request, page, first, chunks),
            media_type="text/csv",
            headers={"Content-Disposition": disposition},
        )

    async def _stream(
        self, request: Request, page: PageRequest, first: bytes, chunks: Iterator[bytes]
    ) -> AsyncIterator[bytes]:
        chunk: bytes | None = first
        while chunk is not None:
            yield chunk
            chunk = await self._in_thread(request, page, lambda: next(chunks, None), None)

    async def _in_thread(self, request: Request, page: PageRequest, work: Callable[[], T], limit_s: float | None) -> T:
        """Run in a thread; ends the queries of the page if the browser goes away or the server ends."""
        done = _start(work)
        ends: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(_until_gone(request)),
            asyncio.ensure_future(self._stopping.wait()),
        ]
        try:
            await asyncio.wait(
                [cast(asyncio.Future[Any], done), *ends], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )
            while not done.done():
                page.stop(f"it took more than {limit_s:g} s" if limit_s else "")
                await asyncio.wait([done], timeout=_STOP_EVERY_S)
            return done.result()
        except asyncio.CancelledError:
            page.stop()
            raise
        finally:
            for end in ends:
                end.cancel()


def _start(work: Callable[[], T]) -> "asyncio.Future[T]":
    """Run in a thread that does not keep the process, whatever it waits for, such as a network."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_result(cast(T, result)) if error is None else done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=run, name="ludic-page", daemon=True).start()
    return done


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _form(request: Request) -> dict[str, str]:
    """Return the fields of a form of type application/x-www-form-urlencoded. Raises ConfigError."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MOST_FORM_BYTES:
            raise ConfigError(f"the form has more than {_MOST_FORM_BYTES:,} bytes")
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=100, errors="strict"))
    except ValueError as error:
        raise ConfigError(f"the form can't be read: {one_line(error)}") from error


# --- HTML, JSON and CSV ----------------------------------------------------------------------------------------------


def _response(request: Request, page: PageRequest, answer: AnyAnswer) -> Response:
    match answer:
        case Redirect():
            return RedirectResponse(answer.href, 303)
        case JsonAnswer():
            return _json(request, answer.value)
        case Result():
            answer = PageAnswer("result.html.j2", {"parts": list(answer.parts())})
    values = {"request": page, "title": answer.title or page.page.title, "menu": menu(), **answer.values}
    return HTMLResponse(_rendered(answer.template, values), answer.status)


def _problem(
    request: Request, error: LudicError, page: PageRequest | None = None, status: int | None = None
) -> Response:
    """Return an error as a page, or as JSON to a script."""
    problem = one_line(error)
    status = status or (404 if isinstance(error, UnknownIdError) else 400)
    if request.headers.get("accept") == "application/json":
        return JSONResponse({"problem": printable(problem)}, status)
    values = {"request": page, "title": "Error", "menu": menu(), "problem": problem}
    return HTMLResponse(_rendered("error.html.j2", values), status)


def _rendered(template: str, values: dict[str, Any]) -> str:
    return templates("web/templates").get_template(template).render(values)


def _colours() -> str:
    """Return the colours of lines, in light and dark, as --s0, --s1, ..."""
    light, dark = (
        " ".join(f"--s{number}: {colour};" for number, colour in enumerate(colours))
        for colours in (COLOURS, DARK_COLOURS)
    )
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


def _json(request: Request, value: Any) -> Response:
    body = json.dumps(spelt(value), allow_nan=False).encode()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers={"ETag": etag})
    return Response(body, media_type="application/json", headers={"ETag": etag})


def _table_of(answer: AnyAnswer, name: str) -> PageTable:
    tables = {table.name: table for table in answer.tables} if isinstance(answer, PageAnswer) else {}
    if name not in tables:
        raise UnknownIdError(f"this page has no table {name!r}; it has {', '.join(tables) or 'none'}")
    return tables[name]


def _csv_chunks(page: PageRequest, table: PageTable) -> Iterator[bytes]:
    """Yield the CSV of a table, some rows at a time."""
    if table.query is None:
        names = list(dict.fromkeys(name for row in table.rows for name in row)) or list(table.columns)
        yield from _chunks(names, ([to_plain(row.get(name)) for name in names] for row in table.rows))
    else:
        with page.data.stream(*table.query) as reader:
            yield from _chunks(reader.schema.names, plain_rows(reader))


def _chunks(names: Sequence[str], rows: Iterator[list[Any]]) -> Iterator[bytes]:
    header = _csv_of(names, [])
    some = list(islice(rows, _ROWS_A_CHUNK))
    yield header + _csv_of(names, some)[len(header) :]
    while some := list(islice(rows, _ROWS_A_CHUNK)):
        yield _csv_of(names, some)[len(header) :]


def _csv_of(names: Sequence[str], rows: Sequence[list[Any]]) -> bytes:
    sink = io.BytesIO()
    write_csv(names, rows, sink)
    return sink.getvalue()
