"""The wheel that users install holds what is not Python: types, schemas, SQL, algorithms, names of other trainers."""

import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

PROJECT = Path(__file__).parents[2]


def test_the_wheel_holds_types_schemas_sql_and_algorithms(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", PROJECT, "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*map(str, build), "--wheel-dir", str(tmp_path)], check=True, timeout=240)
    (wheel,) = tmp_path.glob("ludic_rl-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {
        "ludic/py.typed",
        "ludic/coming_from.toml",
        *(f"ludic/schemas/{file.name}" for file in (PROJECT / "schemas").glob("*.json")),
    }
    for folder in ("root/sql", "training/algorithms"):
        found = (PROJECT / "ludic" / folder).rglob("*")
        files |= {file.relative_to(PROJECT).as_posix() for file in found if file.suffix in (".sql", ".toml")}
    assert len(files) > 40
    assert sorted(files - names) == []
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    code = "from ludic.settings import table; print(table.__file__, table.unknown('lr', ['learning_rate']))"
    # Without site, whose paths lead to this checkout: the folder of the packages, where no .pth is read, is named here.
    lazy_loader = find_spec("lazy_loader")
    assert lazy_loader is not None
    assert lazy_loader.origin is not None
    packages = {**os.environ, "PYTHONPATH": str(Path(lazy_loader.origin).parents[1])}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path / "installed", env=packages, capture_output=True, text=True
    )
    assert done.stdout.startswith(str(tmp_path)), done.stderr
    assert "'lr' is a short name; in ludic it is learning_rate" in done.stdout
