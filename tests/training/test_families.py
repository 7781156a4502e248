"""Every family of models that loads computes exact logprobs; the others are refused by name, before they are loaded.

benchmarks/families.py does the same for all families of the installed transformers.
"""

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.qwen3_5 import modeling_qwen3_5

from benchmarks import families as families_of_transformers
from ludic.engines.transformers_engine import TransformersEngine, exact_attention
from ludic.errors import ModelError
from ludic.models import families
from ludic.models.families import check_family, shrink
from ludic.training.model import load_model, load_sharded

TRAINED = ("llama", "qwen3_moe", "gemma3_text", "deepseek_v3", "gpt2", "mixtral", "cohere", "gpt_oss")
REFUSED = {
    "rwkv": r"logprobs differ by up to \d",
    "gemma2": "caps its attention scores",
    "mpt": "AttributeError",
    "codegen": "RuntimeError",
    "deepseek_v32": "RuntimeError",
    "modernbert-decoder": "TypeError",
    "falcon": "KeyError",
}


def folder_with_config(folder: Path, family: str, **settings: object) -> str:
    """A folder without weights: whoever reads them comes too late."""
    AutoConfig.for_model(family, **settings).save_pretrained(folder)
    return str(folder)


def folder_with_model(folder: Path, family: str) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shrink(AutoConfig.for_model(family))).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", TRAINED)
def test_an_exact_family_is_trained_and_sampled_from(tmp_path: Path, family: str) -> None:
    folder = folder_with_model(tmp_path, family)
    assert load_model(folder).config.model_type == family
    assert TransformersEngine(folder, device="cpu").policy_version == 0


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_with_wrong_logprobs_is_refused_by_name(tmp_path: Path, family: str) -> None:
    folder = folder_with_config(tmp_path, family)
    with pytest.raises(
        ModelError, match=f"{folder}: ludic does not know how to run {family} models.*{REFUSED[family]}"
    ):
        load_model(folder)


def test_a_run_that_goes_on_is_refused_before_its_checkpoint_is_read(mesh, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="rwkv models with packed sequences"):
        load_sharded(folder_with_config(tmp_path, "rwkv"), mesh, with_weights=False)


def test_engine_transformers_refuses_a_family_that_its_batches_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"mamba models with the batches of engine transformers: .*logprobs differ"):
        TransformersEngine(folder_with_config(tmp_path, "mamba"), device="cpu")


def test_engine_transformers_runs_capped_scores_with_eager_attention(tmp_path: Path) -> None:
    engine = TransformersEngine(folder_with_model(tmp_path, "gemma2"), device="cpu")
    assert engine._model.config._attn_implementation == "eager"


def test_rounding_of_large_weights_is_no_error_also_where_padding_meets_softmaxes_in_float32(tmp_path: Path) -> None:
    assert exact_attention(folder_with_config(tmp_path, "granitemoe_swa"), "") == (None, True)


def test_a_family_that_was_not_tried_is_not_called_exact(tmp_path: Path) -> None:
    assert exact_attention(folder_with_config(tmp_path, "mamba2"), "") == (None, False)
    assert families_of_transformers.judge("mamba2") == ["mamba2", "judged by its weights", "not tried"]


@pytest.mark.parametrize(("family", "is_exact"), [("llama", True), ("rwkv", False)])
def test_a_model_that_does_not_shrink_is_judged_by_its_own_weights(tmp_path, monkeypatch, family, is_exact) -> None:
    folder = folder_with_model(tmp_path, family)

    def refuse(config: object) -> None:
        raise ValueError("sizes of another kind")

    monkeypatch.setattr(families, "shrink", refuse)
    if is_exact:
        load_model(folder)
    else:
        with pytest.raises(ModelError, match="rwkv models with packed sequences, as in training: logprobs differ"):
            load_model(folder)


def test_kernels_that_need_cuda_are_left_aside_while_a_family_is_judged_on_the_cpu(tmp_path, monkeypatch) -> None:
    def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
        raise RuntimeError("Expected x.is_cuda() to be true, but got false.")

    monkeypatch.setenv("LUDIC_CACHE_DIR", str(tmp_path / "cache"))
    package = ModuleType("causal_conv1d")
    package.causal_conv1d_fn = causal_conv1d_fn
    monkeypatch.setitem(sys.modules, "causal_conv1d", package)
    # transformers binds packages when a family is imported
    plain = modeling_qwen3_5.causal_conv1d_fn.__wrapped__
    bound = use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "causal_conv1d")(plain)
    monkeypatch.setattr(modeling_qwen3_5, "causal_conv1d_fn", bound)
    model = load_model(folder_with_model(tmp_path / "model", "qwen3_5_text"))
    with pytest.raises(RuntimeError, match=r"Expected x\.is_cuda"):
        model(input_ids=torch.zeros(1, 3, dtype=torch.int64))


@pytest.mark.parametrize(("num_ids", "shrinks"), [(1, True), (1, False), (5, True), (99, False)])
def test_a_model_of_a_small_vocabulary_is_trained_and_sampled_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ids: int, shrinks: bool
) -> None:
    monkeypatch.setenv("LUDIC_CACHE_DIR", str(tmp_path / "cache"))
    config = AutoConfig.for_model(
        "qwen3", vocab_size=num_ids, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, head_dim=16, bos_token_id=None, eos_token_id=num_ids - 1, pad_token_id=num_ids - 1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    if not shrinks:
        monkeypatch.setattr(families, "shrink", lambda config: 1 / 0)
    load_model(str(tmp_path / "model"))
    assert exact_attention(str(tmp_path / "model"), "") == (None, shrinks)
    TransformersEngine(str(tmp_path / "model"), device="cpu")


def test_shrinking_keeps_a_layer_of_each_kind_and_what_is_not_a_size() -> None:
    config = AutoConfig.for_model(
        "qwen3", hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=6,
        layer_types=["full_attention"] * 4 + ["sliding_attention"] * 2, use_sliding_window=True, sliding_window=4096,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6},
    )  # fmt: skip
    small = shrink(config)
    assert small.layer_types == ["full_attention", "sliding_attention"] * 2
    assert (small.hidden_size, small.num_attention_heads, small.num_key_value_heads) == (64, 4, 2)
    assert (small.sliding_window, small.head_dim, small.vocab_size) == (6, 16, 128)
    assert small.rope_parameters["factor"] == 4.0
    assert config.hidden_size == 4096


def _sizes(values: object, name: str = "") -> Iterator[tuple[str, int]]:
    """Numbers of a configuration and of its parts, by the names that they have where they stand."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _sizes(value, key)
    elif isinstance(values, int) and not isinstance(values, bool) and values > 0:
        yield name, values


def test_a_check_crosses_every_length_of_every_family_or_says_why_not() -> None:
    """A length at which layers compute in another way shows only in sequences on both sides of it."""
    tokens = sorted(length + 1 for length in families.SEQUENCE_LENGTHS)
    assert {families.WINDOW - 1, families.WINDOW, families.WINDOW + 1} <= set(tokens)
    speaks_of_a_length = re.compile("length|window|chunk|positions|position_embeddings|ctx|context|seq_?len|block_size")
    left, num_shrunk = {}, 0
    for family in families_of_transformers.names():
        with contextlib.suppress(Exception):  # defaults that a class itself refuses
            config = AutoConfig.for_model(family, **families_of_transformers.INCOMPLETE.get(family, {}))
            large = dict(_sizes(config.to_dict()))
            for name, value in _sizes(families._shrunk(config.to_dict(), 1)):
                num_shrunk += value < large.get(name, 0)
                if speaks_of_a_length.search(name) and value > families.WINDOW:
                    left.setdefault(name, family)
    unnamed = {name for name in left if not any(known.fullmatch(name) for known in families.NO_LIMITS)}
    assert not unnamed, f"the check of {left[min(unnamed)]} would not cross {min(unnamed)}"
    assert num_shrunk > 1000


@pytest.mark.parametrize("name", ["sliding_window", "my_chunk_size", "original_max_position_embeddings", "block_size"])
def test_a_length_of_an_unknown_family_is_shrunk_too_also_in_a_part_and_in_rotary_parameters(name: str) -> None:
    whole = {"num_hidden_layers": 2, name: 4096, "text_config": {name: 4096}}
    small = families._shrunk(whole, 1)
    assert (small[name], small["text_config"][name]) == (families.WINDOW, families.WINDOW)
    rope = {"rope_parameters": {"full_attention": {"rope_type": "yarn", "original_max_position_embeddings": 4096}}}
    found = families._shrunk(rope, 1)["rope_parameters"]["full_attention"]["original_max_position_embeddings"]
    assert found == families.WINDOW


# --- Verdicts ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LUDIC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def judge(folder: str, calls: list[int], *, wrong_by: float = 0.0) -> bool:
    """Judge by a run that is right, or wrong by some nats; counts its calls."""

    def run(model):
        calls.append(1)
        tokens = np.arange(5)
        logprobs = model(torch.arange(5)[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        return [(tokens, logprobs[torch.arange(4), torch.arange(1, 5)] + wrong_by)]

    return check_family(folder, "here", run, attention=None, what=f"a test {wrong_by}")


def test_a_verdict_is_kept_between_processes_until_the_code_changes(tmp_path, cache, monkeypatch) -> None:
    folder, calls = folder_with_config(tmp_path, "llama"), []
    assert judge(folder, calls)
    assert judge(folder, calls)
    assert len(calls) == 1
    for _ in range(2):
        with pytest.raises(ModelError, match=r"here: ludic does not know how to run llama models with a test 0\.01"):
            judge(folder, calls, wrong_by=0.01)
    assert len(calls) == 3  # once more in float64, and then never again
    monkeypatch.setattr(families, "_code_digest", lambda: "another ludic")
    assert judge(folder, calls)
    assert len(calls) == 4


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"is_known": 1, "problem": null}', "\x00"])
def test_a_verdict_that_cannot_be_read_is_given_again(tmp_path, cache, damage: str) -> None:
    folder, calls = folder_with_config(tmp_path, "llama"), []
    judge(folder, calls)
    [file] = (cache / "families").iterdir()
    file.write_text(damage)
    judge(folder, calls)
    assert len(calls) == 2
    assert json.loads(file.read_text()) == {"is_known": True, "problem": None}


def test_no_cache_is_no_error(tmp_path, cache) -> None:
    cache.write_text("a file where the folder should be")
    folder, calls = folder_with_config(tmp_path, "llama"), []
    assert judge(folder, calls)
    assert judge(folder, calls)
    assert len(calls) == 2


def test_a_verdict_draws_no_random_numbers_of_the_program(tmp_path, cache) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    judge(folder_with_config(tmp_path, "llama"), [])
    assert torch.equal(torch.rand(2), expected)
