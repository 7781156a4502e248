"""Pages of the code that decided rewards and advantages: its files, and the text of a user's file as it was stored."""

from ludic.app.show.lookup import UnknownIdError
from ludic.app.show.web.conversation import page_links
from ludic.app.show.web.pages import PageAnswer, PageRequest, PageTable, page, with_values
from ludic.app.show.web.texts import CHARACTERS_A_PAGE, page_of
from ludic.root.sql import figure

_COLUMNS = ("role", "name", "path", "package", "sha256", "num_attempts", "num_lives", "num_characters")


@page("code", "code", menu=70)
def code(request: PageRequest) -> PageAnswer:
    """The code of the run, or one file of it."""
    if request.query.get("sha256"):
        return _file(request, request.required("sha256"), request.required("path"))
    rows = request.data.ask(figure("code_files"), {}).to_dicts()
    table = PageTable(
        name="code",
        rows=rows,
        columns=with_values(rows, _COLUMNS),
        titles={"num_attempts": "attempts", "num_lives": "lives of workers", "num_characters": "characters"},
        links={
            "path": lambda row: row["path"] and request.link("code", sha256=row["sha256"], path=row["path"]),
        },
    )
    return PageAnswer("code.html.j2", {"table": table}, title="Code", tables=[table])


def _file(request: PageRequest, sha256: str, path: str) -> PageAnswer:
    found = request.data.ask(figure("text_of_code"), {"sha256": sha256, "path": path}).to_dicts()
    if not found:
        raise UnknownIdError(f"no file {path!r} with sha256 {sha256[:12]} is stored with this run")
    text = found[0]["text"]
    part = page_of(text, request.whole_number("start", 0))
    values = {
        "part": part,
        "pages": page_links(request, "start", part.length, CHARACTERS_A_PAGE),
        "back": request.link("code"),
        "about": f"{path}, sha256 {sha256}, used as {found[0]['names']}",
    }
    whole = PageTable(name="text", rows=[{"text": text}], columns=("text",))
    return PageAnswer("text.html.j2", values, title=path, tables=[whole])
