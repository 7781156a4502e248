"""A trainer that publishes differences: what workers, exports, samples and checks make of its versions."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import create_root, fill, make_model, query, train_here

from ludic.adapters.exports.weights import export_weights
from ludic.app.show.stats import collect_stats
from ludic.errors import ConfigError
from ludic.rollouts.config import Question
from ludic.rollouts.sample import sample_run
from ludic.root.maintenance.verify import check_root
from ludic.root.root import Root
from ludic.root.weights.policies import fetch_policy, stored_versions
from ludic.training.config import TrainConfig

pytestmark = pytest.mark.slow

SETTINGS = {"learning_rate": 1e-5, "keep_policies": None, "checkpoint_every": 2, "num_steps": 4}


def new_root(folder: Path, name: str) -> Root:
    model = folder / "model"
    root = create_root(str(folder / name), str(model) if model.exists() else make_model(model), steps_per_version=1)
    fill(root, num_files=4)
    return root


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Root, Root]:
    """The same run twice: in full, and with one full version of three; stopped after step 2 and resumed."""
    folder = tmp_path_factory.mktemp("runs")
    full, deltas = new_root(folder, "full"), new_root(folder, "deltas")
    for root, settings in ((full, {}), (deltas, {"full_version_every": 3})):
        for num_steps in (2, 5):
            train_here(root, **SETTINGS | {"publish_dtype": "bfloat16", "num_steps": num_steps}, **settings)
    return full, deltas


def test_a_new_attempt_begins_with_a_full_version(both):
    # Attempt 1 publishes 0, 1, 2. Attempt 2 begins with the weights of 2, and publishes 3, 4, 5.
    _, deltas = both
    names = set(deltas.list("policies"))
    markers = [version for version in range(6) if f"policies/version={version}/config.json" in names]
    assert (stored_versions(deltas), markers) == ([0, 1, 2, 3, 4, 5], [0, 3])


def test_every_version_is_that_of_full_publishing(both, tmp_path):
    full, deltas = both
    for version in range(6):
        mine, theirs = (Path(fetch_policy(root, version, tmp_path)) for root in (deltas, full))
        assert (mine / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
        assert (mine / "config.json").read_bytes() == (theirs / "config.json").read_bytes()
        assert {tensor.dtype for tensor in load_file(mine / "model.safetensors").values()} == {torch.bfloat16}


def test_metrics_have_the_bytes_and_the_seconds_of_versions(both):
    for root, at_most in zip(both, (1.0, 0.5), strict=True):
        rows = query(
            root, "select publish_bytes, publish_write_s from metrics where publish_bytes is not null order by 1"
        )
        sizes = [size for size, _ in rows]
        assert len(rows) >= 2  # those that were complete when the next step was logged: fewer on a busy machine
        assert all(0 < seconds < 60 for _, seconds in rows)
        assert sizes[0] <= at_most * sizes[-1]


def test_the_root_is_sound_and_a_missing_base_is_found(both):
    _, deltas = both
    assert list(check_root(deltas).findings) == []
    assert collect_stats(deltas).facts["policies"] == {"num_versions": 6, "num_stored": 6, "newest_stored": 5}
    config = deltas.read("policies/version=3/config.json")
    deltas.delete("policies/version=3/config.json")
    try:
        found = {(finding.where, finding.problem) for finding in check_root(deltas).findings}
    finally:
        deltas.put("policies/version=3/config.json", config)
    assert found == {("policies/version=4", "holds differences to version 3, which has no weights")}


def test_a_version_of_differences_is_exported_and_sampled_as_a_full_one(both, tmp_path):
    full, deltas = both
    for name, root in {"full": full, "deltas": deltas}.items():
        report = export_weights(root, str(tmp_path / name), version=5)
        assert report.source == "policies/version=5"
    files = {
        name: {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("full", "deltas")
    }
    assert files["full"] == files["deltas"]
    answers = [
        sample_run(root, Question(prompt="aa ab", n=2, run={"max_tokens": 4}), version=5) for root in (full, deltas)
    ]
    assert [a.tokens.tolist() for a in answers[0]] == [a.tokens.tolist() for a in answers[1]]


def test_adapters_are_published_as_differences(tmp_path):
    root = new_root(tmp_path, "run")
    settings = SETTINGS | {"lora_rank": 4, "publish_lora": "adapter", "full_version_every": 9}
    train_here(root, **settings)
    folder = Path(fetch_policy(root, 4, tmp_path / "cache"))
    assert {"adapter_config.json", "adapter_model.safetensors", "config.json"} <= {f.name for f in folder.iterdir()}
    assert "adapter_model.safetensors.delta" in {name.rpartition("/")[2] for name in root.list("policies/version=4")}
    by_step, by_version = tmp_path / "step", tmp_path / "version"
    export_weights(root, str(by_step), step=4)
    export_weights(root, str(by_version), version=4)
    assert (by_step / "model.safetensors").read_bytes() == (by_version / "model.safetensors").read_bytes()
    assert list(check_root(root).findings) == []


def test_the_published_dtype_is_that_of_the_forward_pass_unless_it_is_set(tmp_path):
    root = new_root(tmp_path, "run")
    train_here(root, **SETTINGS | {"num_steps": 1})
    train_here(root, **SETTINGS | {"num_steps": 2, "publish_dtype": "bfloat16"})
    configs = [json.loads(root.read(f"policies/version={version}/config.json")) for version in (0, 3)]
    assert [config["dtype"] for config in configs] == ["float32", "bfloat16"]


def test_a_dtype_of_adapters_is_refused():
    with pytest.raises(ConfigError, match="publish_dtype is bfloat16, but adapters are published in float32"):
        TrainConfig.of(lora_rank=4, publish_lora="adapter", publish_dtype="bfloat16")
