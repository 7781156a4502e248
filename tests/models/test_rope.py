"""Rotary positions depend on a row and the run's settings, not on the other rows of a pass.

A longrope model has original_max_position_embeddings 64. Rows of 30 and 100 tokens lie on both sides of it. What is
right is transformers' own model, on a row alone: it takes the short factors up to 64 tokens and the long ones above.
"""

import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import query
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

import ludic
from ludic.app.launch.roots import with_longrope
from ludic.engines.engine import Completion, GenerationRequest, SamplingParams, generate_all
from ludic.engines.transformers_engine import TransformersEngine, exact_attention
from ludic.environments.moar_cats import WORDS
from ludic.errors import ConfigError, ModelError
from ludic.models.families import logprobs_alone, shrink, spread
from ludic.models.rope import check_served, max_positions, original_length
from ludic.models.tiny import make_tiny_model
from ludic.models.weight_files import load_config, load_pretrained
from ludic.run.config import RunConfig
from ludic.training.model import check_trainable, full_state_dict, load_model, load_sharded, packed_logprobs
from ludic.training.model import save_weights as save

ORIGINAL, LENGTHS = 64, (30, 100)
SHORT = [1.0 + 0.1 * number for number in range(8)]
LONG = [2.0 + number for number in range(8)]
ROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "rope_theta": 1e4}


def config_of(family: str, rope: dict, **values: object) -> PreTrainedConfig:
    return AutoConfig.for_model(
        family, vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        rope_parameters=rope, **values,
    )  # fmt: skip


def save_model(folder: Path, config: PreTrainedConfig) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        spread(model)
    model.save_pretrained(folder)
    return str(folder)


def phi3(**values: object) -> PreTrainedConfig:
    return config_of("phi3", dict(ROPE), original_max_position_embeddings=ORIGINAL, **values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("phi3") / "model", phi3())


@pytest.fixture(scope="module")
def rows() -> list[np.ndarray]:
    numbers = np.random.default_rng(0)
    return [numbers.integers(3, 128, length, dtype=np.int32) for length in LENGTHS]


def with_factors(folder: str, longrope: str) -> PreTrainedModel:
    """transformers' model, which takes one set of factors for rows of any length."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    rope = model.config.rope_parameters
    rope["short_factor"] = rope["long_factor"] = SHORT if longrope == "short" else LONG
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model


@pytest.mark.parametrize("longrope", ["short", "long"])
def test_a_row_packed_with_a_longer_one_has_the_logprobs_and_the_gradient_of_the_row_alone(folder, rows, longrope):
    plain, model = with_factors(folder, longrope), load_model(folder, longrope=longrope)
    parts = packed_logprobs(model, rows).split([len(row) - 1 for row in rows])
    for row, found in zip(rows, parts, strict=True):
        torch.testing.assert_close(found, logprobs_alone(plain, row), atol=1e-4, rtol=0)
    parts[0].sum().backward()  # the short row's, beside the long one
    logprobs_alone(plain, rows[0]).sum().backward()
    for name, parameter in plain.named_parameters():
        found = model.get_parameter(name).grad
        assert (found - parameter.grad).norm() <= 1e-3 * parameter.grad.norm(), name


@pytest.mark.parametrize(("longrope", "side"), [("short", 0), ("long", 1)])
def test_a_row_on_the_side_of_its_factors_has_the_logprobs_of_transformers_itself(folder, rows, longrope, side):
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    found = packed_logprobs(load_model(folder, longrope=longrope), rows).split([len(row) - 1 for row in rows])[side]
    torch.testing.assert_close(found, logprobs_alone(plain, rows[side]), atol=1e-4, rtol=0)


def test_the_two_sets_of_factors_differ(folder, rows):
    short, long = (packed_logprobs(load_model(folder, longrope=name), rows) for name in ("short", "long"))
    assert (short - long).abs().max() > 1


def asked(length: int, max_tokens: int) -> GenerationRequest:
    prompt = np.arange(3, 3 + length, dtype=np.int32)
    return GenerationRequest(prompt_tokens=prompt, params=SamplingParams(max_tokens=max_tokens), seed=7)


def one_pass(model: PreTrainedModel, request: GenerationRequest, done: Completion) -> torch.Tensor:
    return logprobs_alone(model, np.concatenate([request.prompt_tokens, done.tokens]))[-len(done.tokens) :]


def test_a_request_has_the_same_completion_beside_a_longer_one_and_across_the_original_length(folder):
    engine = TransformersEngine(folder, device="cpu", longrope="long")
    request, long = asked(58, 12), asked(90, 12)  # the first one crosses 64 tokens
    [alone] = generate_all(engine, [request])
    beside, _ = generate_all(engine, [request, long])
    assert alone.tokens.tolist() == beside.tokens.tolist()
    np.testing.assert_allclose(alone.logprobs, beside.logprobs, atol=1e-4)
    found = one_pass(with_factors(folder, "long"), request, beside)
    np.testing.assert_allclose(beside.logprobs, found.detach().numpy(), atol=1e-4)


def test_an_engine_with_short_factors_ends_rows_where_they_end(folder):
    engine = TransformersEngine(folder, device="cpu")
    assert engine.max_length == ORIGINAL
    [done] = generate_all(engine, [asked(30, 34)])
    found = one_pass(with_factors(folder, "short"), asked(30, 34), done)
    np.testing.assert_allclose(done.logprobs, found.detach().numpy(), atol=1e-4)
    with pytest.raises(ConfigError, match="the model holds 64"):
        generate_all(engine, [asked(30, 35)])
    assert TransformersEngine(folder, device="cpu", longrope="long").max_length == 256


def test_weights_that_are_saved_keep_the_configuration_and_have_all_their_factors(folder, tmp_path, mesh):
    model = load_sharded(folder, mesh, longrope="long")
    save(model, full_state_dict(model), tmp_path)
    before, after = (json.loads(Path(path, "config.json").read_text()) for path in (folder, tmp_path))
    assert before == after
    assert load_config(str(tmp_path)).rope_parameters["short_factor"] == SHORT


def test_a_resuming_trainer_takes_the_factors_without_the_weights(folder, rows, mesh):
    whole = load_sharded(folder, mesh, longrope="long")
    resumed = load_sharded(folder, mesh, longrope="long", with_weights=False)
    resumed.load_state_dict(whole.state_dict())
    torch.testing.assert_close(packed_logprobs(resumed, rows), packed_logprobs(whole, rows))


def test_phimoe_gets_its_long_factors_with_its_long_scale(tmp_path, rows):
    """transformers 5.19 gives it the short factors always."""
    rope = ROPE | {"original_max_position_embeddings": ORIGINAL, "short_mscale": 1.1, "long_mscale": 1.3}
    path = save_model(tmp_path, config_of("phimoe", rope, num_local_experts=4))
    rotary = load_pretrained(path, dtype=None, longrope="long").model.rotary_emb
    cosine, _ = rotary(torch.ones(1), torch.tensor([[5]]))
    # The k-th frequency is 1 / (factor of k * theta^(k / 8)).
    expected = [1.3 * np.cos(5 / (LONG[k] * 1e4 ** (k / 8))) for k in range(8)]
    np.testing.assert_allclose(cosine[0, 0, :8], expected, atol=1e-6)


def test_a_type_of_layer_may_have_factors_of_its_own(tmp_path, rows):
    rope = {
        "full_attention": ROPE | {"original_max_position_embeddings": ORIGINAL},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    types = ["sliding_attention", "full_attention"]
    config = config_of("gemma3_text", rope, head_dim=16, sliding_window=16, layer_types=types)
    assert original_length(config) == ORIGINAL
    path = save_model(tmp_path, config)
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    for side, longrope in enumerate(("short", "long")):
        parts = packed_logprobs(load_model(path, longrope=longrope), rows).split([len(row) - 1 for row in rows])
        torch.testing.assert_close(parts[side], logprobs_alone(plain, rows[side]), atol=1e-4, rtol=0)


# --- What is refused, and what is not ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_dynamic_is_refused_by_name_before_weights_are_read(tmp_path, family):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    if family == "gemma3_text":
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config_of(family, rope).save_pretrained(tmp_path)
    for check in (check_trainable, exact_attention):
        with pytest.raises(ModelError, match=f"here: {family} with rope_type dynamic is not supported: a row's rotary"):
            check(str(tmp_path), "here")
    with pytest.raises(ModelError, match="rope_type dynamic"):
        load_pretrained(save_model(tmp_path / "model", config_of(family, rope)), dtype=None)


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("llama", {"rope_type": "linear", "factor": 2.0}),
        ("llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
        ("llama", {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 64,
                   "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("hunyuan_v1_dense", {"rope_type": "dynamic", "factor": 1.0, "alpha": 100.0}),
    ],
)  # fmt: skip
def test_a_kind_that_does_not_look_at_a_pass_is_exact_as_it_is(tmp_path, rows, family, rope):
    path = save_model(tmp_path, config_of(family, {"rope_theta": 1e4} | rope, head_dim=16))
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    found = packed_logprobs(load_model(path), rows)
    torch.testing.assert_close(found, torch.cat([logprobs_alone(plain, row) for row in rows]), atol=1e-4, rtol=0)


# --- The run's choice ----------------------------------------------------------------------------------------------


def run_of(folder: str, **settings: object) -> RunConfig:
    return RunConfig(model=folder, env=("moar_cats",), **{"max_tokens": 20} | settings)


@pytest.mark.parametrize(
    ("settings", "longrope"),
    [
        ({}, "short"),
        ({"max_sequence_tokens": 64}, "short"),
        ({"max_sequence_tokens": 65}, "long"),
        ({"longrope": "long"}, "long"),
        ({"longrope": "long", "max_sequence_tokens": 40}, "long"),
        ({"longrope": "short"}, "short"),
    ],
)
def test_a_run_takes_long_factors_if_its_rows_may_be_longer_than_the_original_length(folder, settings, longrope):
    assert with_longrope(run_of(folder, **settings), Path(folder)).longrope == longrope


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"max_tokens": 64},
            "max_tokens is 64, and rows of .* have at most 64 tokens, .*set max_sequence_tokens above 64",
        ),
        ({"longrope": "short", "max_sequence_tokens": 65}, "max_sequence_tokens is 65, .* and leave longrope out"),
        ({"max_sequence_tokens": 257}, "max_sequence_tokens is 257, and rows of .* have at most 256 tokens$"),
    ],
)
def test_lengths_that_the_factors_or_the_model_do_not_reach_are_refused(folder, settings, message):
    with pytest.raises(ConfigError, match=message):
        with_longrope(run_of(folder, **settings), Path(folder))


def test_longrope_of_another_model_is_refused(tmp_path):
    config_of("llama", {"rope_type": "default", "rope_theta": 1e4}).save_pretrained(tmp_path)
    run = run_of(str(tmp_path))
    assert with_longrope(run, tmp_path) == run
    with pytest.raises(ConfigError, match=f"longrope is long, and {tmp_path} is not a longrope model"):
        with_longrope(replace(run, longrope="long"), tmp_path)


@pytest.mark.parametrize(("longrope", "served"), [(None, 64), ("short", 10), ("long", 65), ("long", 256)])
def test_a_max_model_len_of_the_same_factors_is_taken(longrope, served):
    check_served(phi3(), longrope, served, "vLLM has")


@pytest.mark.parametrize(
    ("longrope", "served", "message"),
    [
        (None, 65, "takes the short ones, so start it with a max_model_len of at most 64"),
        ("short", 256, "vLLM has max_model_len 256, by which vLLM chooses"),
        ("long", 64, "takes the long ones, so start it with a max_model_len above 64"),
        ("long", -1, "max_model_len -1"),
        ("short", "auto", "max_model_len auto"),
    ],
)
def test_a_max_model_len_of_other_factors_is_refused(longrope, served, message):
    with pytest.raises(ConfigError, match=message):
        check_served(phi3(), longrope, served, "vLLM has")
    check_served(config_of("llama", {"rope_type": "default", "rope_theta": 1e4}), longrope, served, "vLLM has")


@pytest.mark.parametrize("family", ["xlnet", "bloom"])
def test_a_model_without_positions_has_no_limit(family):
    assert max_positions(AutoConfig.for_model(family), None) == sys.maxsize  # XLNet's says -1


def test_the_small_model_of_a_check_crosses_its_original_length():
    small = shrink(phi3())
    assert (original_length(small), max_positions(small, "short"), max_positions(small, "long")) == (6, 6, 256)


# --- All processes of a run ----------------------------------------------------------------------------------------

_PACKAGE = Path(ludic.__file__).parent
_OWN_FACTORS = {
    "app/launch/sample.py: publish_first": "copies the weights",
    "app/launch/sample.py: save": "copies the weights",
    "app/launch/vllm_server.py: main": "reads all arguments from JSON",
    "engines/vllm_engine.py: __init__": "has a default without a run",
    "app/demos/words.py: heldout_answers": "samples from the demo's own model",
    "adapters/exports/weights.py: _merge_adapter": "copies the weights",
    "training/checkpoint.py: _read_weights": "copies the weights",
    "models/weight_files.py: check_folder": "reads the weights' names and shapes",
    "models/experts.py: routing_of": "looks at the routers of a model without memory",
    "models/lora.py: try_adapters": "looks at the layers of a model without memory",
    "models/reward_model.py: __init__": "is no model of the run: short",
    "models/reward_model.py: _load": "is no model of the run: short",
    "training/memory.py: _on_meta": "counts operations",
    "training/model.py: kernels_keep_borders": "compares a small model with itself",
}
"""Callers that run no tokens of the run through a model, by file and function."""


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Functions with their names; a class's fields and its __init__ have the name of the class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from ((node.name, part) for part in node.body if isinstance(part, ast.AnnAssign))
            yield from (
                (node.name, part) for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"
            )
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node


def _takes_factors(node: ast.AST) -> bool:
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id == "longrope"
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return any(argument.arg == "longrope" for argument in (*node.args.args, *node.args.kwonlyargs))


@pytest.mark.slow
def test_whoever_makes_a_model_or_an_engine_hands_on_the_factors_of_the_run() -> None:
    trees = {path.relative_to(_PACKAGE).as_posix(): ast.parse(path.read_text()) for path in _PACKAGE.rglob("*.py")}
    takers: dict[str, set[str]] = {path: set() for path in trees}
    for path, tree in trees.items():
        for name in {name for name, node in _functions(tree) if _takes_factors(node)} - {"RunConfig"}:
            for other in [path] if name.startswith("_") else trees:
                takers[other].add(name)
    assert takers["app/operations/run.py"] >= {
        "load_pretrained",
        "load_model",
        "load_sharded",
        "EngineSetup",
        "ServerArguments",
    }
    missing = set()
    for path, tree in trees.items():
        for function in (node for _, node in _functions(tree) if not isinstance(node, ast.AnnAssign)):
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                called = [call.func, *call.args[:1]] if getattr(call.func, "id", "") == "partial" else [call.func]
                if not takers[path] & {getattr(each, "id", "") for each in called}:
                    continue
                given = [ast.unparse(part) for part in (*call.args, *(part.value for part in call.keywords))]
                is_given = any("longrope" in each or each in ("'short'", "'long'") for each in given)
                if not is_given:
                    missing.add(f"{path}: {function.name}")
    assert missing == set(_OWN_FACTORS)


@pytest.mark.slow
@pytest.mark.parametrize(("longest", "max_tokens", "longrope"), [(None, 6, "short"), (200, 24, "long")])
def test_a_run_records_its_factors_and_samples_trains_evaluates_and_refers_with_them(
    tmp_path, longest, max_tokens, longrope
):
    model = str(tmp_path / "model")
    make_tiny_model(model, WORDS)
    ids = AutoTokenizer.from_pretrained(model)
    config = phi3(sliding_window=None)
    config.vocab_size, config.eos_token_id, config.pad_token_id = len(ids), ids.eos_token_id, ids.pad_token_id
    config.original_max_position_embeddings = config.rope_parameters["original_max_position_embeddings"] = 26
    save_model(Path(model), config)
    run = ludic.create(
        str(tmp_path / "run"), model=model, env="moar_cats", group_size=4, groups_per_batch=2, max_tokens=max_tokens,
        accept_incomplete=True, max_sequence_tokens=longest,
    )  # fmt: skip
    assert json.loads(run.root.read("run.json"))["longrope"] == longrope
    run.worker(2)
    run.train(device="cpu", dtype="float32", num_steps=1, reference=model, kl_weight=0.1, rollout_timeout_s=9.0)
    ((sampler_kl, reference_kl, longest_row),) = query(
        run.root,
        "select sampler_kl, reference_kl, (select max(prompt_length + response_length) from rollouts)"
        " from metrics where kind = 'train'",
    )
    assert abs(sampler_kl) < 1e-6
    assert abs(reference_kl) < 1e-6
    assert (longest_row > 26) == (longrope == "long")  # of 13 to 20 tokens are prompts
    plain = with_factors(model, longrope)
    run.eval(0, n=2, num_examples=2)
    for tokens, logprobs in query(run.root, "select prompt_tokens || response_tokens, response_logprobs from evals"):
        found = logprobs_alone(plain, np.array(tokens))[-len(logprobs) :]
        np.testing.assert_allclose(logprobs, found.detach().numpy(), atol=1e-4)
