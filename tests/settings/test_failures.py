"""Where a user's code failed, as a row stores it: one line with the place, and a traceback without ludic's frames."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ludic.agents.requests import EpisodeFailedError, fails_the_episode
from ludic.environments.limits import TimeLimit
from ludic.settings.user_code import CodeFailure, describe_at, load_file
from ludic.settings.user_files import UserFile

OWN = """\
import json


def score(answer):
    return helper(answer)


def helper(answer):
    return json.loads(answer)


async def step(answer):
    return score(answer)


def hide(answer):
    try:
        score(answer)
    except ValueError as error:
        raise RuntimeError("no JSON") from error


def deep(left):
    return deeper(left)


def deeper(left):
    return deep(left - 1) if left else 1 / left


def password(answer):
    raise KeyError("https://user:secret-word@host/")
"""


@pytest.fixture(scope="module")
def own() -> Any:
    return load_file(UserFile(path=Path("/nowhere/rewards.py"), source=OWN.encode()))


def failure(call: Callable[[], Any]) -> CodeFailure:
    with pytest.raises(EpisodeFailedError) as caught, fails_the_episode():
        call()
    return CodeFailure(error=str(caught.value), traceback=caught.value.traceback)


def test_the_line_names_the_innermost_frame_of_the_users_file(own: Any) -> None:
    found = failure(lambda: own.score("{"))
    assert found.error == (
        "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1) "
        "(rewards.py:9, in helper)"
    )


def test_the_traceback_begins_with_the_users_code_and_shows_the_lines_that_ran(own: Any) -> None:
    async def in_time() -> Any:
        return await TimeLimit(timeout_s=5).wait("step", own.step("{"))

    with pytest.raises(EpisodeFailedError) as caught, fails_the_episode():
        asyncio.run(in_time())
    lines = (caught.value.traceback or "").splitlines()
    at = next(index for index, line in enumerate(lines) if "rewards.py" in line)
    # Before the file there is the coroutine of this test, and nothing of ludic and asyncio.
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[at : at + 2] == ['  File "/nowhere/rewards.py", line 13, in step', "    return score(answer)"]
    assert lines[-1].startswith("json.decoder.JSONDecodeError: ")


def test_the_cause_that_the_user_gives_is_kept(own: Any) -> None:
    found = failure(lambda: own.hide("{"))
    assert found.error == "RuntimeError: no JSON (rewards.py:20, in hide)"
    traceback = found.traceback or ""
    assert traceback.index("line 9, in helper") < traceback.index("direct cause") < traceback.index("line 20, in hide")


def test_the_middle_of_a_long_traceback_is_left_out(own: Any) -> None:
    found = failure(lambda: own.deep(100))
    assert found.error == "ZeroDivisionError: division by zero (rewards.py:28, in deeper)"
    traceback = found.traceback or ""
    assert 4_000 < len(traceback) < 4_100
    assert "characters left out" in traceback
    assert traceback.endswith("ZeroDivisionError: division by zero")


def test_secrets_are_masked(own: Any) -> None:
    found = failure(lambda: own.password(""))
    assert "secret-word" not in f"{found.error}{found.traceback}"
    assert "***@host" in (found.traceback or "")


def test_the_line_of_a_notebook_is_shown_and_that_of_a_file_is_named(tmp_path: Path):
    text = "def reward(completion):\n    words = completion.split()\n    return words[3]"
    (tmp_path / "rewards.py").write_text(text)
    places = {}
    for origin in ("notebook", "<ipython-input-3-77>", str(tmp_path / "rewards.py")):
        source = f"{text}\n# Lines of: {origin}\n".encode()
        with pytest.raises(IndexError) as caught:
            load_file(UserFile(path=tmp_path / "inputs.py", source=source)).reward("dogs")
        places[origin] = describe_at(caught.value)
    index_error = "IndexError: list index out of range"
    assert places == {
        "notebook": f"{index_error} (notebook, line 3: return words[3])",
        "<ipython-input-3-77>": f"{index_error} (<ipython-input-3-77>, line 3: return words[3])",
        str(tmp_path / "rewards.py"): f"{index_error} ({tmp_path}/rewards.py, line 3)",
    }
