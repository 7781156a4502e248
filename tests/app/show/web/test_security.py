"""Who gets an answer: a token is exchanged once for a cookie, and only this machine's own pages may ask or write."""

import html
import re

import pytest
from app.show.web.browsers import HOME, browsing

from ludic.app.show.web.pages import PAGES, Page, PageRequest, Redirect
from ludic.root.root import Root


def test_a_token_is_exchanged_once_for_a_cookie_and_stays_in_no_address(trained: Root):
    with browsing(trained, is_in=False) as browser:
        client, token = browser.client, browser.tokens[0]
        for path in ("/", "/overview", "/static/page.js", "/rollouts?csv=rollouts", "/?token=", f"/?token={token}x"):
            refused = client.get(path)
            assert (refused.status_code, "set-cookie" in refused.headers) == (401, False), path
            assert trained.url not in refused.text
        assert client.head(f"/?token={token}").status_code == 401  # as by a program that previews links
        taken = client.get(f"/rollouts?where=a%20%3D%201&token={token}&order=b")
        assert (taken.status_code, taken.headers["location"]) == (303, "/rollouts?where=a+%3D+1&order=b")
        name, *attributes = taken.headers["set-cookie"].split("; ")
        assert attributes == ["Path=/", "HttpOnly", "SameSite=Strict"]
        assert client.get("/overview").status_code == 200
        assert len(browser.tokens) == 2
        client.cookies.clear()
        assert client.get(f"/?token={token}").status_code == 401  # it was used
        assert client.get("/overview", headers={"Cookie": name + "x"}).status_code == 401
        assert client.get("/overview", headers={"Cookie": name}).status_code == 200
        again = client.get("/overview?token=old", headers={"Cookie": name})  # a bookmark of the first address
        assert (again.status_code, again.headers["location"]) == (303, "/overview")
        client.cookies.clear()
        asked = client.get("/rollouts", params=[("where", "a = '<\">'"), ("run", "x"), ("run", "y")])  # a sent link
        form = re.search(r'<form action="(.*?)">', asked.text)
        fields = re.findall(r'<input type="hidden" name="(.*?)" value="(.*?)">', asked.text)
        assert form is not None
        assert form[1] == "/rollouts"
        assert '<input name="token"' in asked.text
        sent = [
            *((name, html.unescape(value)) for name, value in fields),
            ("token", f" {HOME}/?token={browser.tokens[1]}"),
        ]
        led = client.get(form[1], params=sent)
        assert (led.status_code, led.headers["location"]) == (
            303,
            asked.request.url.raw_path.decode().replace("%20", "+"),
        )
        client.cookies.clear()
        away = client.get(f"{HOME}//evil.example/x?token={browser.tokens[2]}")
        assert away.headers["location"] == "/evil.example/x"


def test_only_requests_for_this_machine_by_its_own_pages_are_answered(trained: Root):
    with browsing(trained) as browser:
        for host, status in {
            "127.0.0.1:8000": 200,
            "localhost": 200,
            "LOCALHOST:8000": 200,
            "evil.example": 403,
            "127.0.0.1.evil.example": 403,
            "[::1": 403,
            "": 403,
        }.items():
            assert browser.client.get("/static/page.css", headers={"Host": host}).status_code == status, host
        for origin in ("http://evil.example", "null", "http://[::1", "http://127.0.0.1:8001", "http://localhost:8000"):
            refused = browser.client.get("/overview", headers={"Origin": origin})
            assert (refused.status_code, "rollouts" in refused.text) == (403, False), origin
        assert browser.client.get("/overview", headers={"Origin": HOME}).status_code == 200
        assert browser.client.put("/overview").status_code == 403


def test_a_page_writes_only_if_it_takes_posts_and_its_own_form_was_sent(trained: Root, monkeypatch: pytest.MonkeyPatch):
    seen: list[PageRequest] = []

    def note(request: PageRequest) -> Redirect:
        seen.append(request)
        return Redirect(request.link("overview"))

    monkeypatch.setitem(PAGES, "note", Page("note", "note", note, None, True, True))
    own = {"Origin": HOME}
    with browsing(trained) as browser:
        client = browser.client
        assert client.post("/note", data={"mark": "1"}).status_code == 403
        assert client.post("/note", data={"mark": "1"}, headers={"Origin": "http://evil.example"}).status_code == 403
        assert client.post("/overview", headers=own).status_code == 400
        assert client.post("/note", content=b"x" * (1 << 21), headers=own).status_code == 400
        assert seen == []
        taken = client.post("/note", data={"mark": "", "note": "a & b"}, headers=own)
        assert (taken.status_code, taken.headers["location"]) == (303, "/overview")
        assert seen[0].form == {"mark": "", "note": "a & b"}


def test_every_answer_forbids_other_servers_frames_inline_scripts_and_storage(trained: Root):
    with browsing(trained) as browser:
        answers = {path: browser.client.get(path) for path in ("/overview", "/nothing", "/state", "/static/page.css")}
        browser.client.cookies.clear()
        answers["without a cookie"] = browser.client.get("/overview")
        answers["of another host"] = browser.client.get("/overview", headers={"Host": "evil.example"})
    for path, answer in answers.items():
        policy = dict(each.split(" ", 1) for each in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'", path
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'", path
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        is_file = path.startswith("/static/")
        assert answer.headers["cache-control"] == ("no-cache" if is_file else "no-store"), path
