"""The version of ludic in records, installed or run from a folder of sources."""

import importlib.metadata
from importlib.metadata import PackageNotFoundError, version

import pytest

from ludic.code.kept import record_of
from ludic.environments.registry import source_of
from ludic.installed import installed_version, is_installed
from ludic.sql import BatchRules


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
