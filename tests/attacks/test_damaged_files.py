"""Files of a run truncated, zeroed or emptied: a trainer goes on or says what is broken."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DAMAGES: Mapping[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "zeroed": lambda content: bytes(len(content)),
    "emptied": lambda content: b"",
    "with a tail": lambda content: content + b"tail",
}


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
