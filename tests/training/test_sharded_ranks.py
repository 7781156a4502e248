"""Two real ranks that load in shards: what each holds, and that one rank computes the same."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from forks import run_ranks
from model_families import random_model_of
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from ludic.models.lora import add_adapters
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

pytestmark = pytest.mark.slow

FAMILIES = ("qwen2", "gemma2", "gemma3")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    random_model_of("qwen2").save_pretrained(folder / "model")
    return put_run(str(folder / "root"), RunConfig(model=str(folder / "model"), env=("moar_cats",)))


@pytest.fixture(scope="module")
def seen(tmp_path_factory, root):
    """What each of the two ranks found."""
    out = tmp_path_factory.mktemp("ranks")
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "vocab_size": 256}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8)).save_pretrained(out / "large")  # 256 MB of layers
    for family in FAMILIES:
        random_model_of(family).save_pretrained(out / family)
    run_ranks(2, [Path(__file__).with_name("sharded_on_ranks.py"), out, root.url, out / "large"], out)
    return [json.loads((out / f"rank={rank}.json").read_text()) for rank in (0, 1)]


def test_a_rank_holds_its_shards_and_only_rank_0_ever_saw_the_whole_model(seen):
    of_main, of_other = (of_rank["memory"] for of_rank in seen)
    assert of_main["shards"] + of_other["shards"] == pytest.approx(of_main["whole"], rel=1e-3)
    assert of_other["shards"] == pytest.approx(of_other["whole"] / 2, rel=1e-2)
    assert of_other["peak"] < 0.8 * of_other["whole"]
    assert of_main["peak"] > of_main["whole"]


@pytest.mark.parametrize("family", FAMILIES)
def test_references_in_shards_off_loaded_or_not_are_the_whole_model(seen, family):
    for of_rank in seen:
        found = of_rank["differences"][family]
        assert set(found) == {"sharded first", "sharded second", "offloaded first", "offloaded second"}
        assert max(found.values()) < 1e-5


def test_what_one_rank_computed_another_finds(seen):
    for of_rank in seen:
        assert of_rank["cached"]["num_computed"] == [2]  # once, then never again
        assert len(of_rank["cached"]["files"]) == 1
        assert of_rank["cached"]["first"] == 0
        assert of_rank["cached"]["second"] < 1e-5


def test_adapters_train_on_two_ranks_as_on_one_which_goes_on_from_them(train_here, seen, root):
    adapt = partial(add_adapters, source=root.record.model, rank=2, alpha=8)
    expected = train_here(root.url, attempt_id=1, steps=range(1, 6), prepare=adapt)
    resumed = train_here(root.url, attempt_id=3, steps=range(4, 6), prepare=adapt, resume_from=(2, 3))
    for found, wanted in zip(seen[0]["adapters"] + resumed, expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    one, two = (load_file(f"{root.path}/checkpoints/attempt={a}/step=5/adapter_model.safetensors") for a in (1, 3))
    assert all(torch.allclose(two[name], one[name], rtol=0, atol=2e-5) for name in one)
