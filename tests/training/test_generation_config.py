"""A generation_config.json that transformers reads and refuses to write is stored, as it is, with all weights."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import create_root, fill, make_model, train_here
from transformers import GenerationConfig

from ludic.adapters.exports.weights import export_weights
from ludic.errors import ModelError
from ludic.models.weight_files import load_generation_config

SETTINGS = ({}, {"publish_lora": "merged", "lora_rank": 2}, {"publish_lora": "adapter", "lora_rank": 2})
VALUES = (True, False, -1, 0, 3, 0.6, "never", [2])


def refused_files(folder: Path) -> Iterator[dict[str, Any]]:
    """Contents of one entry that transformers reads and does not write, of all that it knows."""
    for name in GenerationConfig().to_dict():
        for value in VALUES:
            values = {"eos_token_id": [2], name: value}
            (folder / "generation_config.json").write_text(json.dumps(values))
            try:
                found = GenerationConfig.from_pretrained(folder)
            except Exception:  # of any type: then no model of the folder loads
                continue
            try:
                found.validate(strict=True)
            except ValueError:
                yield values


def test_each_file_that_transformers_does_not_write_is_written_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "read").mkdir()
    names = set()
    for values in refused_files(tmp_path / "read"):
        found = load_generation_config(str(tmp_path / "read"))
        assert found is not None
        found.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "generation_config.json").read_text()) == values
        names |= values.keys()
    assert {"temperature", "top_p", "top_k", "early_stopping", "pad_token_id"} <= names


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: each.get("publish_lora", "whole"))
def test_a_run_publishes_keeps_and_exports_such_a_file(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = make_model(tmp_path / "model")
    text = '{"do_sample": false, "temperature": 0.6,   "eos_token_id": [2]}'
    Path(model, "generation_config.json").write_text(text)
    root = create_root(str(tmp_path / "run"), model)
    fill(root, num_files=1)
    assert train_here(root, num_steps=1, checkpoint_every=1, **settings) == 1
    assert train_here(root, num_steps=2, checkpoint_every=1, **settings) == 2  # from the checkpoint
    for name, choice in {"step": {"step": 1}, "version": {"version": 2}}.items():
        export_weights(root, str(tmp_path / name), **choice)
        assert (tmp_path / name / "generation_config.json").read_text() == text


def test_a_file_that_transformers_does_not_read_is_still_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"num_return_sequences": 4}')
    with pytest.raises(ModelError, match=r"no generation_config\.json that transformers can use: Greedy methods"):
        load_generation_config(str(tmp_path))
