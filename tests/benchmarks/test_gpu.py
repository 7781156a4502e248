"""`make gpu` runs to its end on a CPU, and without the packages that a bare machine lacks."""

import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Annotated

import pytest
from packaging.requirements import Requirement

from benchmarks.bare_machine import StandIn, stand_ins

REPOSITORY = Path(__file__).parents[2]
NEEDED = ("torch", "transformers", "safetensors", "pyarrow")


def distributions(names: tuple[str, ...]) -> dict[str, Distribution]:
    """The installed distributions of these names, and all that they need without extras."""
    found: dict[str, Distribution] = {}
    left = list(names)
    while left:
        name = left.pop()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # needed on other systems
            continue
        needs = map(Requirement, found[name].requires or ())
        left += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder of packages as a machine with PyTorch and transformers has it, and no more."""
    folder = tmp_path / "site"
    folder.mkdir()
    for each in distributions(NEEDED).values():
        for top in {file.parts[0] for file in each.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(each.locate_file(top))))
    return folder


def measure(tmp_path: Path, *options: str, python: tuple[str, ...] = (sys.executable,), **variables: str) -> str:
    file = tmp_path / "gpu.md"
    command = [*python, "-m", "benchmarks.gpu", "--device", "cpu", "--file", str(file), *options]
    # Processes that compile beside it would import torch first.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"} | variables
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=850)
    text = file.read_text() if file.exists() else ""
    assert done.returncode == 0, f"{text}\n{done.stderr}"
    return text


def rows(text: str, part: str) -> dict[str, list[str]]:
    """The rows of a part's table by their first cell."""
    table = re.search(rf"## {part}.*?\n\n(.*?)\n\n", text, re.DOTALL)
    assert table, text
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.group(1).splitlines()[2:]]
    return {first: rest for first, *rest in cells}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    text = measure(tmp_path)
    assert "failed" not in text
    exactness = rows(text, "attention")
    assert exactness["qwen3"][0] == exactness["gemma3_text"][0] == "exact"
    ways = rows(text, "step")
    wanted = ways.pop("float32 on the CPU")
    for name, (loss, norm, off, *_) in ways.items():
        # bfloat16 has 8 bits of precision.
        assert float(loss) == pytest.approx(float(wanted[0]), rel=2**-8), name
        assert float(norm) == pytest.approx(float(wanted[1]), rel=2**-6), name
        assert float(off.rstrip("%")) < (4 if "bfloat16" in name else 0.01), name
    assert len(ways) == 5
    assert "365 days" in rows(text, "group")["its limit"][0]
    # Against float64: bfloat16 has 8 bits, float32 24.
    assert float(rows(text, "head")["bfloat16"][1]) > 2**-12 > 2**-18 > float(rows(text, "head")["float32"][1])
    for cells in [*rows(text, "speed").values(), *rows(text, "choices").values()]:
        if "torchao is not installed" not in cells[0]:
            tokens_a_second, planned = float(cells[0].replace(",", "")), float(cells[3])
            assert tokens_a_second > 0 < planned
    # 90% of 4 GB, without the 2 GB that CUDA takes by itself, are 1.6 GB.
    chosen = next(
        cells for name, cells in rows(text, "choices").items() if name.startswith("chosen for 4 GiB: bfloat16")
    )
    assert 1.4 < float(chosen[3]) < 1.6e9 / 2**30
    assert set(rows(text, "files")) >= {"publish: gather", "checkpoint: write (beside the next steps)"}
    assert rows(text, "run")["transformers"][0] == "3"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_machine_without_ludics_packages_measures_what_it_can(tmp_path: Path, bare: Path) -> None:
    # -S leaves out the site packages of this environment.
    python, variables = (sys.executable, "-S"), {"PYTHONPATH": str(bare)}
    text = measure(tmp_path, "--part", "attention", "files", "speed", python=python, **variables)
    assert {"msgspec", "duckdb", "polars"} <= set(rows(text, "machine")["not installed"][0].split(", "))
    assert rows(text, "attention")["qwen3"][0] == "exact"
    assert rows(text, "files")["checkpoint"][0].startswith("not measured")
    assert float(rows(text, "speed")["tiny, bfloat16"][3]) > 0  # memory is planned there, too


def test_a_machine_without_a_gpu_and_ludics_packages_is_told_how_to_try(bare: Path) -> None:
    command = [sys.executable, "-S", "-m", "benchmarks.gpu"]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(bare)}
    done = subprocess.run(command, cwd=REPOSITORY, env=hidden, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.strip() == "gpu: PyTorch finds no CUDA device here; --device cpu shows that the parts run"


def test_a_missing_package_can_be_imported_within_the_block_and_used_nowhere() -> None:
    with stand_ins(["msgspeck", "msgspec"]):
        import msgspec
        import msgspeck
        from msgspeck import Meta, json

        count = Annotated[int, msgspeck.Meta(ge=0)]
    assert msgspec.json.decode(b"[1]") == [1]  # which is installed
    assert isinstance(count.__metadata__[0], StandIn)
    for call in (Meta, json.decode, count.__metadata__[0]):
        with pytest.raises(ModuleNotFoundError, match=r"^msgspeck\S* is called, but msgspeck is not installed$"):
            call(b"[1]")
    with pytest.raises(ModuleNotFoundError, match="No module named 'msgspeck'"):
        import_module("msgspeck")
