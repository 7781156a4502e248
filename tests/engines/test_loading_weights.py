"""What every engine promises of load_weights, tried on every implementation; see tests/models/test_weight_files.py."""

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_requests import PROMPT, a_request, tokens_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from ludic.engines.engine import Completion, Engine, GenerationRequest, generate_all
from ludic.errors import ModelError
from ludic.models.tiny import make_tiny_model


@cache
def model_of(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logprobs_of_spans(folders: Sequence[str], prompt: np.ndarray, completion: Completion) -> np.ndarray:
    """(length,) float64: logprobs when each span's weights continue the key-value cache of the spans before.

    folders: versions take turns with them.
    """
    kept, context, logits = DynamicCache(), prompt, []
    for span in completion.weight_versions:
        model = model_of(folders[span.version % len(folders)])
        # A token's keys and values are computed when the token after it is sampled.
        inputs = np.concatenate([context, completion.tokens[span.start : span.end - 1]]).astype(np.int64)
        with torch.inference_mode():
            found = model(torch.from_numpy(inputs)[None], past_key_values=kept).logits[0].double()
        logits.append(found[len(context) - 1 :])
        context = completion.tokens[span.end - 1 : span.end]
    logprobs = torch.cat(logits).log_softmax(dim=-1).numpy()
    return logprobs[np.arange(len(logprobs)), completion.tokens]


def rarely_stopping(folder: str, target: Path) -> str:
    """Copy weights with a zero embedding of the end-of-sequence token, whose logit is then 0; returns the folder."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[model.config.eos_token_id] = 0
    model.save_pretrained(target)
    return str(target)


@pytest.mark.slow
@pytest.mark.timeout(600)  # a server on a busy machine takes minutes for as many answers
def test_each_token_has_the_logprob_of_its_spans_weights_however_often_they_change(
    engine: Engine, model_folder: str, other_weights: str, tmp_path: Path
) -> None:
    """Prompts of no, one and three blocks of vLLM's prefix cache on the CPU; requests of other seeds share them."""
    folders = [rarely_stopping(folder, tmp_path / Path(folder).name) for folder in (model_folder, other_weights)]
    prompts = [PROMPT, *(np.random.default_rng(0).integers(3, 64, length).astype(np.int32) for length in (130, 300))]
    found: list[tuple[GenerationRequest, Completion]] = []
    engine.load_weights(folders[0], 10)

    def is_enough() -> bool:
        return sum(len(completion.weight_versions) > 2 for _, completion in found) >= 8

    async def keep_asking(seed: int) -> None:
        while not is_enough():
            prompt = prompts[seed % 3]
            request = a_request(prompt, seed=seed, max_tokens=200)
            found.append((request, await engine.generate(request)))
            seed += 24

    async def generate() -> None:
        asking = asyncio.gather(*(keep_asking(seed) for seed in range(24)))
        version, until = 10, time.monotonic() + 500
        while not is_enough():
            assert time.monotonic() < until
            await engine.generate(a_request(max_tokens=40))
            version += 1
            await asyncio.to_thread(engine.load_weights, folders[version % 2], version)
        await asking

    asyncio.run(generate())
    found.sort(key=lambda pair: -len(pair[1].weight_versions))
    for request, completion in found[:24]:
        spans = completion.weight_versions
        assert [0, *(span.end for span in spans)] == [*(span.start for span in spans), len(completion.tokens)]
        versions = [span.version for span in spans]
        assert versions == sorted(set(versions))
        assert (completion.policy_version, completion.policy_version_last) == (spans[0].version, spans[-1].version)
        expected = logprobs_of_spans(folders, request.prompt_tokens, completion)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4, rtol=0)


def test_sharded_weights_are_loaded(engine: Engine, other_weights: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(other_weights).save_pretrained(tmp_path, max_shard_size="100kB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    engine.load_weights(str(tmp_path), 1)
    sharded = tokens_of(generate_all(engine, [a_request()]))
    engine.load_weights(other_weights, 2)
    assert sharded == tokens_of(generate_all(engine, [a_request()]))


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def truncate_config(folder: Path) -> None:
    data = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(data[: len(data) // 2])


def drop_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def add_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def change_a_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].T.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def lose_a_shard(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    remove_weights(folder)
    model.save_pretrained(folder, max_shard_size="100kB")
    sorted(folder.glob("model-*-of-*.safetensors"))[1].unlink()


def pickle_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    remove_weights(folder)


def grow_the_model(folder: Path) -> None:
    make_tiny_model(str(folder), ["another one"], hidden_size=128)


def change_the_positions(folder: Path) -> None:
    """Other rotations with the same shapes of weights."""
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 500.0
    (folder / "config.json").write_text(json.dumps(config))


def remove_everything(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_everything, "no such folder"),
        (remove_weights, "model.safetensors"),
        (remove_config, "config.json"),
        (truncate_config, "config.json"),
        (drop_a_tensor, "missing_keys.*layers.1.mlp.up_proj"),
        (add_a_tensor, "unexpected_keys.*layers.2.mlp.up_proj"),
        (change_a_shape, "mismatched_keys.*layers.1.mlp.up_proj"),
        (lose_a_shard, "could not be loaded"),
        (pickle_weights, "model.safetensors"),
        (grow_the_model, "hidden_size 128 instead of 64"),
        (change_the_positions, "rope_parameters"),
    ],
)
def test_a_damaged_folder_is_refused_and_the_old_weights_stay(
    engine: Engine, other_weights: str, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    engine.load_weights(other_weights, 4)  # as in a run, where sound weights of the same configuration came before
    before = generate_all(engine, [a_request()])
    folder = tmp_path / "policy"
    shutil.copytree(other_weights, folder)
    damage(folder)
    with pytest.raises(ModelError, match=f"(?s){message}"):
        engine.load_weights(str(folder), 5)
    assert engine.policy_version == 4
    assert tokens_of(generate_all(engine, [a_request()])) == tokens_of(before)


@pytest.mark.parametrize("kept", [0, 7, 8, 1000, 100_000, -1])
def test_weights_cut_off_anywhere_are_refused_and_the_old_ones_stay(
    engine: Engine, other_weights: str, tmp_path: Path, kept: int
) -> None:
    before = generate_all(engine, [a_request()])
    folder = tmp_path / "policy"
    shutil.copytree(other_weights, folder)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:kept])
    with pytest.raises(ModelError, match="could not be loaded"):
        engine.load_weights(str(folder), 5)
    assert engine.policy_version == 0
    assert tokens_of(generate_all(engine, [a_request()])) == tokens_of(before)


def test_weights_in_use_do_not_change_with_the_folder_they_came_from(
    engine: Engine, other_weights: str, tmp_path: Path
) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(other_weights, folder)
    engine.load_weights(str(folder), 1)
    before = tokens_of(generate_all(engine, [a_request()]))
    (folder / "model.safetensors").write_bytes(b"")
    assert tokens_of(generate_all(engine, [a_request()])) == before
