"""A worker whose rewards are those of a reward model: each row has its score, and the root records the model."""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_models import logits_by_hand, make_reward_model, publish

import ludic
from ludic.adapters.reward_models import digest_of
from ludic.models import reward_model
from ludic.run.run_json import create_root


@pytest.mark.slow
def test_a_workers_rows_have_the_models_reward(tmp_path: Path, run_config, work, monkeypatch) -> None:
    model = make_reward_model(tmp_path / "judge", seed=5)
    sizes: list[int] = []
    forward = reward_model._forward

    def counted(model, sequences):
        sizes.append(len(sequences))
        return forward(model, sequences)

    monkeypatch.setattr(reward_model, "_forward", counted)
    rows = [{"question": f"what is the sum of {a} {b}"} for a in "abcd" for b in "abcd"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    env = f"qa/{tmp_path}/rows.jsonl"
    options = {
        "answer": None,
        "heldout_share": 0,
        "scorer": {f"model:{model}": 2.0},
        "scorer_options": {f"model:{model}": {"name": "judge", "max_wait_ms": 200}},
    }
    settings = {"env": (env,), "env_options": {env: options}, "group_size": 4, "accept_incomplete": True}
    root = create_root(str(tmp_path / "run"), run_config(**settings))
    publish(root, root.record.model, budget=4)
    work(root, num_groups=4)

    run = ludic.open(root.url)
    found = run.sql("select episode_reward, reward_components as c, messages, error from rollouts").to_dicts()
    assert len(found) == 16
    for row in found:
        assert row["error"] is None
        said = [(each["role"], each["content"]) for each in row["messages"]]
        (wanted,) = logits_by_hand(model, *said)
        parts = {each["key"]: each["value"] for each in row["c"]} if isinstance(row["c"], list) else row["c"]
        assert parts["judge"] == pytest.approx(wanted, abs=1e-4)
        assert row["episode_reward"] == pytest.approx(2 * wanted, abs=1e-4)
    assert np.ptp([row["episode_reward"] for row in found]) > 0.1
    assert sum(sizes) == 16
    assert len(sizes) < 16  # answers shared forward passes

    (record,) = run.sql("select name, sha256, package, imports from code where role = 'scorer'").to_dicts()
    digest, files = digest_of(model, None)
    assert (record["name"], record["sha256"]) == (f"model:{model}", digest)
    assert record["package"].startswith("transformers ")
    assert len(files["model.safetensors"]) == 64
    assert files["model.safetensors"] in json.dumps(record["imports"], default=str)
