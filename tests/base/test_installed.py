"""The version of ludic in records, installed or run from a folder of sources."""

import importlib.metadata
import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from ludic.base.installed import EXTRAS, installed_version, is_installed, missing_extra
from ludic.environments.registry import source_of
from ludic.errors import ConfigError
from ludic.root.sql.planner import BatchRules
from ludic.run.code_snapshots import record_of


@pytest.fixture
def not_installed(monkeypatch):
    def find_nothing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", find_nothing)


def test_records_name_the_installed_version():
    assert installed_version("ludic-rl") == version("ludic-rl")
    assert source_of("addition", {})[1] == f"ludic-rl {version('ludic-rl')}"


@pytest.mark.usefixtures("not_installed")
def test_a_folder_of_sources_that_is_not_installed_has_no_version():
    assert installed_version("ludic-rl") is None
    digest, package, _ = source_of("addition", {})
    assert (len(digest), package) == (64, None)
    advantage = record_of(BatchRules(advantage="rloo", groups_per_batch=1).uses()[0], {})
    assert (len(advantage.sha256), advantage.package) == (64, None)


def test_a_folder_with_the_name_of_a_package_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "no_such_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert is_installed("numpy")
    assert not is_installed("no_such_package")


def test_extras_are_those_that_install_the_packages():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    brought = {
        re.split(r"[<>=\[;]", each)[0].replace("-", "_"): extra
        for extra in ("train", "plot")
        for each in project["optional-dependencies"][extra]
    }
    assert {**brought} == {**EXTRAS, "ludic_rl": "train"}


def test_an_import_that_fails_deep_inside_says_which_extra_is_missing(monkeypatch):
    monkeypatch.setitem(EXTRAS, "absent", "train")
    found = missing_extra(ModuleNotFoundError("No module named 'absent.part'", name="absent.part"))
    assert isinstance(found, ImportError)
    assert isinstance(found, ConfigError)
    assert str(found) == "the package absent is not installed; pip install 'ludic-rl[train]'"
    for name in ("other", "torch.part_of_another_version"):
        assert missing_extra(ModuleNotFoundError(f"No module named '{name}'", name=name)) is None
