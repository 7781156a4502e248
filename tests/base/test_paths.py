"""URLs are never paths: where only a file of this machine will do, a URL is refused in one line."""

from pathlib import Path

import pytest

from ludic.adapters.imports.formats import load_format
from ludic.base.paths import is_url, local_path
from ludic.environments.registry import make_environment
from ludic.errors import ConfigError
from ludic.root.sql.library import load_advantage, load_filter, load_function


@pytest.mark.parametrize("text", ["s3://bucket/run", "memory://run", "file:///tmp/run", "gs://b", "https://host/a"])
def test_a_scheme_makes_a_url(text: str) -> None:
    assert is_url(text)
    with pytest.raises(ConfigError, match=r"^--out is .*, a URL; wanted a path on this machine"):
        local_path(text, "--out")


@pytest.mark.parametrize("text", ["runs/demo", "/tmp/run", "~/run", "a:b", "org/name", "C:/run", "./s3:/bucket"])
def test_a_path_is_no_url(text: str) -> None:
    assert not is_url(text)
    assert local_path(text, "--out") == Path(text)


@pytest.mark.parametrize(
    "load",
    [
        lambda: load_advantage("s3://bucket/mine.sql"),
        lambda: load_filter("s3://bucket/mine.sql"),
        lambda: load_function("s3://bucket/mine.py:scaled"),
        lambda: load_format("s3://bucket/mine.py:mine"),
        lambda: make_environment("s3://bucket/cats.py:Cats", {}, seed=0),
    ],
)
def test_a_users_file_is_on_this_machine(load) -> None:
    with pytest.raises(ConfigError, match=r"is s3://bucket/.*, a URL; wanted a path on this machine, so copy the file"):
        load()
