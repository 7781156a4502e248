"""Tests that need vLLM; `make test-vllm` makes an environment with it and runs them."""

import pytest

from ludic.base.installed import is_installed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if is_installed("vllm"):
        return
    for item in items:
        if "tests/vllm_runs/" in item.path.as_posix():
            item.add_marker(
                pytest.mark.skip("vllm is not installed; `make test-vllm` installs it and runs these tests")
            )
