"""Secrets in texts: every form in which a server or a program writes them, whole and cut."""

import base64

import hypothesis
import pytest
from hypothesis import strategies
from secret_forms import KEY, forms_of

from ludic.base import masking
from ludic.base.masking import has_secret, keep_secret, mask, mask_values, public_url, secrets_of
from ludic.errors import one_line


@pytest.fixture(autouse=True)
def only_these(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_given", set())


@pytest.mark.parametrize("secret", [KEY, "hunter2/", "p\u00e4ss\U0001f600w\u00f6rd"])
@pytest.mark.parametrize("form", sorted(forms_of("")))
def test_a_secret_is_found_in_every_form(secret: str, form: str) -> None:
    keep_secret(secret)
    written = forms_of(secret)[form]
    # The characters of base64 that also hold bits of the bytes around it stay: at most 3 before and 3 after.
    masked = mask(f"the key is {written}, not this")
    assert masked.startswith("the key is ")
    assert masked.endswith(", not this")
    assert len(masked) <= len("the key is ***, not this") + 2 * 3
    assert mask(masked) == masked


@pytest.mark.parametrize("form", sorted(forms_of("")))
def test_what_others_cut_off_is_found_too(form: str) -> None:
    keep_secret(KEY)
    written = forms_of(KEY)[form]
    unit = len(written) / len(KEY)  # characters of one of the key's
    for part in (written[: len(written) // 2], written[len(written) // 2 :]):
        left = mask(f"{part} ...").replace("***", "").removesuffix(" ...")
        assert len(left) <= 7 * max(1.0, unit) + 6


PIECES = (
    "\\",
    "%",
    "&",
    ";",
    "\n",
    "é",
    "a",
    "4",
    "=",
    " ",
    "sig=",
    "?token=",
    "Bearer ",
    "://",
    "me@",
    "hf_" + "A" * 20,
)


@hypothesis.given(
    strategies.lists(
        strategies.one_of(
            strategies.sampled_from(PIECES),
            strategies.tuples(
                strategies.sampled_from(sorted(forms_of(KEY).values())),
                strategies.integers(0, 60),
                strategies.integers(1, 90),
            ).map(lambda cut: cut[0][cut[1] : cut[1] + cut[2]]),
        ),
        max_size=9,
    )
)
def test_a_quick_search_first_changes_nothing(pieces: list[str]) -> None:
    keep_secret(KEY)
    texts = ["".join(pieces), *pieces]
    found = {"texts": [mask(text) for text in texts]}
    assert mask_values({"texts": texts}) == found
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(masking, "_may_hold", lambda *_: True)
        patched.setattr(masking, "_may_show", lambda *_: True)
        assert {"texts": [mask(text) for text in texts]} == found


def test_ordinary_words_stay() -> None:
    for short in ("", "a", "key"):
        keep_secret(short)
    keep_secret(KEY)
    text = "no key: mail me@host, see http://host/a@b?c=d and the token budget of max_tokens=3 at 50%"
    assert mask(text) == text


def test_the_environments_secrets_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in masking.VARIABLES:
        monkeypatch.setenv(name, f"{name}: of-{name}/0123456789")
        assert mask(f"<{base64.b64encode(f'of-{name}/0123456789'.encode()).decode()}>").count("***") == 1, name
        monkeypatch.delenv(name)


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "HUGGING_FACE_HUB_TOKEN", "MY_CLIENT_SECRET", "DB_PASSWORD"])
def test_so_are_those_of_variables_whose_names_end_like_a_key(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    said = "the server said abcdef-01234 and abcdef-0123"
    assert mask(said) == said
    monkeypatch.setenv(name, "abcdef-01234")  # of 12 characters; set after masking was used
    assert mask(said) == "the server said *** and ***"  # of the second, parts of 6 characters are found
    monkeypatch.setenv(name, "abcdef-0123")
    assert mask(said) == said
    monkeypatch.delenv(name)
    assert mask(said) == said


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "MAX_TOKENS", "TOKEN_FILE", "SECRETS", "KEYBOARD_LAYOUT"])
def test_variables_whose_names_only_hold_such_a_word_are_no_secrets(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "abcdef-0123456789")
    assert mask("abcdef-0123456789") == "abcdef-0123456789"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("s3://me:p/w@host", "s3://***@host"),
        ("http://h:80/x@y", "http://h:80/x@y"),
        ("http://a:80@host", "http://***@host"),
        ("x://://a:p/w@h", "x://://***@h"),
        ("http://AKIAABCDEFGH1234:p/w@h", "http://***@h"),
        ("'http://a:p/w'@h", "'http://a:p/w'@h"),
        ("http://a:p/w@b@c", "http://***@b@c"),
    ],
)
def test_a_password_in_a_url_is_masked_up_to_its_at_sign(text: str, masked: str) -> None:
    assert mask(text) == masked


def test_what_stands_around_a_secret_betrays_it() -> None:
    text = "AKIAABCDEFGH1234 http://me:pw@host/ 'Bearer abc' ?X-Amz-Signature=1f2e&b=1 token=t1"
    assert mask(text) == "*** http://***@host/ 'Bearer ***' ?***&b=1 ***"
    assert one_line(ValueError(text)) == mask(text)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://me:pw@host:80/v1?a=1", "http://host:80/v1"),
        ("http://me:p/w@host", "http://host"),
        ("http://me:80/w@host", "http://host"),
        ("az://container/run?sv=1&sig=pw", "az://container/run"),
        ("https://host/#token=pw", "https://host/"),
        ("mcp:https://me:pw@host/sse", "mcp:https://host/sse"),
        ("simplecache::s3://me:pw@bucket/a b", "simplecache::s3://bucket/a b"),
    ],
)
def test_a_url_is_shown_without_its_secret(url: str, shown: str) -> None:
    assert public_url(url) == shown
    assert has_secret(url) or "/" in url.partition("://")[2].partition("@")[0]  # there the host ends before the slash


def test_names_of_versions_and_plain_urls_hold_no_secret() -> None:
    for url in ("s3://bucket/run@57", "s3://bucket@57", "http://[::1]:8000/v1", "me@host", "runs/a@b", "C:/x@y"):
        assert not has_secret(url)


def test_settings_that_hold_a_secret_are_found_by_name_and_by_url() -> None:
    values = {"hf_token": "hf_1", "max_tokens": "3", "inner": [{"api_key": ""}, {"url": "http://a:b@c"}], "key_file": 3}
    assert list(secrets_of(values)) == ["hf_token", "url"]
