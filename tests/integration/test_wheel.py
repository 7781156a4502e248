"""The wheel that users install holds what is not Python: types, schemas, SQL, algorithms."""

import subprocess
import sys
import zipfile
from pathlib import Path

PROJECT = Path(__file__).parents[2]


def test_the_wheel_holds_types_schemas_sql_and_algorithms(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", PROJECT, "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*map(str, build), "--wheel-dir", str(tmp_path)], check=True, timeout=240)
    (wheel,) = tmp_path.glob("ludic_rl-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {"ludic/py.typed", *(f"ludic/schemas/{file.name}" for file in (PROJECT / "schemas").glob("*.json"))}
    for folder in ("sql", "training/algorithms"):
        found = (PROJECT / "ludic" / folder).rglob("*")
        files |= {file.relative_to(PROJECT).as_posix() for file in found if file.suffix in (".sql", ".toml")}
    assert len(files) > 40
    assert sorted(files - names) == []
