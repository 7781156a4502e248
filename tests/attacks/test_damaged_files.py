"""Every file of a run truncated, zeroed or emptied: verify names it, and a trainer goes on or says what is broken."""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ludic.errors import LudicError
from ludic.maintenance.verify import check_root
from ludic.store import Root

pytestmark = pytest.mark.slow

DAMAGES: Mapping[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "zeroed": lambda content: bytes(len(content)),
    "emptied": lambda content: b"",
    "with a tail": lambda content: content + b"tail",
}
UNCHECKED = ("logs/",)
"""Plain text for people, of which no digest is kept."""


def test_verify_names_every_file_that_is_damaged(breakable: Path) -> None:
    files = sorted(path for path in breakable.rglob("*") if path.is_file())
    assert len(files) > 10
    root = Root.open(str(breakable))
    for path, damage in zip(files, itertools.cycle(DAMAGES), strict=False):
        name = path.relative_to(breakable).as_posix()
        content = path.read_bytes()
        if name.startswith(UNCHECKED) or DAMAGES[damage](content) == content:
            continue
        path.unlink()  # a policy and a checkpoint may share a file of the disk
        path.write_bytes(DAMAGES[damage](content))
        assert any(path.name in said or name in said for said in _said(root)), f"{name} {damage} is not named"
        path.write_bytes(content)
    assert _said(root) == []


def _said(root: Root) -> list[str]:
    """Where and what verify finds; run.json, without which there is no run, when it is opened."""
    try:
        return [f"{finding.where} {finding.problem}" for finding in check_root(Root.open(root.url)).findings]
    except LudicError as error:
        return [str(error)]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "pattern", ["batches/*/*.parquet", "policies/version=1/*", "checkpoints/*/*/*", "rollouts/*/*/*"]
)
def test_a_trainer_goes_on_or_says_in_a_line_what_is_broken(ludic, breakable: Path, pattern: str, damage: str) -> None:
    for path in sorted(breakable.glob(pattern)):
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(DAMAGES[damage](content))
    result = ludic("train", breakable, "--num-steps", "2", "--rollout-timeout-s", "0.2")
    assert result.code in (0, 1)
    assert "Traceback" not in result.err
    assert result.code == 0 or [line for line in result.err.splitlines() if line.startswith("ludic: ")]
