"""Engines by name: those of ludic, and a user's own class in a file."""

import subprocess
import sys
from pathlib import Path

import pytest

from ludic.engines.config import EngineConfig
from ludic.engines.registry import EngineSetup, check_engine, engine_maker, find_engine
from ludic.errors import ConfigError

OWN = """
class Own:
    max_length = 8

    def __init__(self, folder, *, version, setup):
        self.policy_version, self.about = version, (folder, setup.device, setup.base(), setup.float32_head)
"""


def test_a_built_in_engine_is_found() -> None:
    assert find_engine("transformers").__name__ == "make_engine"


@pytest.mark.parametrize("find", [check_engine, find_engine])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "transformer",
            "engine 'transformer' is unknown; did you mean 'transformers'? There are transformers, vllm",
        ),
        ("zzz", "engine 'zzz' is unknown; there are transformers, vllm"),
        ("none.py:Own", "engine none.py:Own: there is no file "),
        ("s3://bucket/own.py:Own", "a URL; wanted a path on this machine"),
    ],
)
def test_an_unknown_name_is_answered_with_what_there_is(find, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        find(name)
    assert message in str(refused.value)


def test_an_engine_of_ones_own_is_made_with_what_the_worker_knows(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    config = EngineConfig(engine=f"{tmp_path}/own.py:Own")
    engine = engine_maker(EngineSetup(config=config, device="cpu", base=lambda: "base", float32_head=True))("folder", 7)
    assert (engine.policy_version, engine.about) == (7, ("folder", "cpu", "base", True))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (OWN, "Other", "has no class or function 'Other'"),
        ("raise KeyError('reward')", "Own", "own.py, line 1, failed: KeyError: 'reward'"),
    ],
)
def test_a_file_that_gives_no_engine_is_named(tmp_path: Path, source: str, name: str, message: str) -> None:
    (tmp_path / "own.py").write_text(source)
    with pytest.raises(ConfigError, match=message):
        find_engine(f"{tmp_path}/own.py:{name}")


def test_looking_a_name_up_imports_no_engine() -> None:
    code = "import sys; from ludic.engines.registry import check_engine; check_engine('transformers')"
    found = "print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", f"{code}; {found}"], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
