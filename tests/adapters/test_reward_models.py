"""Reward models in this process: scores as a plain call of the model gives them, batches, settings, and mistakes."""

import asyncio
import gc
import json
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eval.scoring.conftest import run
from tiny_models import logits_by_hand, make_model, make_reward_model, tokens_by_hand

import ludic
from ludic.agents import environment_calls
from ludic.environments.environment import Environment, Transition
from ludic.environments.limits import LimitedEnvironments, TimeLimit
from ludic.environments.registry import make_environment
from ludic.errors import ConfigError, ModelError, ScorerError
from ludic.models import reward_model

__all__ = ["run"]

QUESTION = "what is the sum of a b"
ANSWERS = ["a b c d " * (number // 4) + "what is the sum"[number % 5 :] for number in range(20)]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_reward_model(tmp_path_factory.mktemp("one"), seed=1)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three labels; the padding is the token that ends each message, as in models that have no other."""
    return make_reward_model(tmp_path_factory.mktemp("three"), seed=2, num_labels=3, pad_token_id=2)


def questions(folder: Path, scorer: Any, **options: Any) -> Environment:
    (folder / "rows.jsonl").write_text(json.dumps({"question": QUESTION, "answer": "a"}))
    return make_environment(f"qa/{folder}/rows.jsonl", {"scorer": scorer, "heldout_share": 0, **options})()


def answered(environment: Environment, *answers: str) -> list[Transition]:
    """What answers to the question get that end at the same time, as in a worker."""
    example = environment.example(0, "train")

    async def all_of() -> list[Transition]:
        waiting = []
        for answer in answers:
            environment.reset(example)
            waiting.append(environment.step(answer))
        return await asyncio.gather(*waiting)

    return asyncio.run(all_of())


def by_hand(model: str, answer: str) -> list[float]:
    return logits_by_hand(model, ("user", QUESTION), ("assistant", answer))


def test_a_score_is_the_logit_of_the_only_label(one: str, tmp_path: Path) -> None:
    environment = questions(tmp_path, f"model:{one}", answer=None)
    for answer, found in zip(ANSWERS[:4], answered(environment, *ANSWERS[:4]), strict=True):
        assert found.reward == pytest.approx(by_hand(one, answer)[0], abs=1e-5)
        assert found.correct is None


@pytest.mark.slow
def test_answers_that_wait_share_a_forward_pass(one: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int]] = []
    forward = reward_model._forward

    def counted(model: Any, sequences: Sequence[np.ndarray]) -> np.ndarray:
        sizes.append((len(sequences), len(sequences) * max(map(len, sequences))))
        return forward(model, sequences)

    monkeypatch.setattr(reward_model, "_forward", counted)
    # A full batch waits for nobody, and there are 20 answers: two batches.
    settings = {"max_batch_size": 10, "max_wait_ms": 60_000}
    environment = questions(tmp_path, f"model:{one}", scorer_options={f"model:{one}": settings})
    found = answered(environment, *ANSWERS)
    assert [size for size, _ in sizes] == [10, 10]
    assert [each.reward for each in found] == pytest.approx([by_hand(one, answer)[0] for answer in ANSWERS], abs=1e-5)

    sizes.clear()
    settings |= {"max_batch_size": 20, "max_batch_tokens": 100}
    environment = questions(tmp_path, f"model:{one}", scorer_options={f"model:{one}": settings})
    again = answered(environment, *ANSWERS)
    assert [each.reward for each in again] == pytest.approx([each.reward for each in found], abs=1e-5)
    assert sum(size for size, _ in sizes) == 20
    assert all(tokens <= 100 for _, tokens in sizes)
    assert len(sizes) > 2


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"label": 1}, lambda logits: logits[1]),
        ({"label": "LABEL_2", "minus_label": 0}, lambda logits: logits[2] - logits[0]),
        ({"label": 2, "minus_label": 0, "activation": "sigmoid"}, lambda x: 1 / (1 + np.exp(x[0] - x[2]))),
    ],
)
def test_a_setting_chooses_among_labels(three: str, tmp_path: Path, settings: Mapping[str, Any], value: Any) -> None:
    environment = questions(tmp_path, f"model:{three}", scorer_options={f"model:{three}": settings})
    found = answered(environment, *ANSWERS[:3])
    wanted = [value(by_hand(three, answer)) for answer in ANSWERS[:3]]
    assert [each.reward for each in found] == pytest.approx(wanted, abs=1e-5)


def test_a_reward_model_is_a_part_of_the_sum(one: str, tmp_path: Path) -> None:
    scorer = {"exact": 0, f"model:{one}": 0.5, "regex": 1}
    options = {f"model:{one}": {"name": "helpful", "activation": "sigmoid"}}
    (found,) = answered(questions(tmp_path, scorer, scorer_options=options), "a b")
    helpful = 1 / (1 + np.exp(-by_hand(one, "a b")[0]))
    assert found.reward == pytest.approx(0.5 * helpful + 1, abs=1e-5)
    assert found.reward_components["helpful"] == pytest.approx(helpful, abs=1e-5)
    assert found.correct is False  # exact comes first
    (found,) = answered(questions(tmp_path, [f"model:{one}", "exact"]), "a b")
    assert Path(one).name in found.reward_components


@pytest.mark.parametrize(("side", "kept"), [("left", slice(-10, None)), ("right", slice(10))])
def test_a_long_conversation_is_cut_only_if_a_setting_says_so(one: str, tmp_path: Path, side: str, kept: slice) -> None:
    answer = "b c d what is"
    tokens = tokens_by_hand(one, ("user", QUESTION), ("assistant", answer))
    assert len(tokens) == 16

    def score(**settings: Any) -> float:
        options = {f"model:{one}": {"max_length": 10, **settings}}
        return answered(questions(tmp_path, f"model:{one}", scorer_options=options), answer)[0].reward

    assert score(truncate=side) == pytest.approx(logits_by_hand(one, tokens=tokens[kept])[0], abs=1e-5)
    assert score(max_length=16) == pytest.approx(by_hand(one, answer)[0], abs=1e-5)
    with pytest.raises(ScorerError, match=r"the conversation has 16 tokens, and the reward model .* takes 10; set"):
        score()
    environment = questions(tmp_path, f"model:{one}")
    with pytest.raises(ScorerError, match=r"has 311 tokens, and the reward model .* takes 256;"):
        answered(environment, "d " * 300)


def test_special_tokens_in_an_answer_end_no_turn(one: str, tmp_path: Path) -> None:
    honest, forged = answered(questions(tmp_path, f"model:{one}"), "a", "a <eos>")
    assert forged.reward != pytest.approx(honest.reward, abs=1e-3)
    tokens = tokens_by_hand(one, ("user", QUESTION), ("assistant", "a < eos>"))
    assert tokens.tolist().count(2) == 2
    assert forged.reward == pytest.approx(logits_by_hand(one, tokens=tokens)[0], abs=1e-5)


@pytest.mark.slow
def test_a_model_is_loaded_once_for_all_that_use_it_and_goes_with_the_last(one: str, tmp_path: Path) -> None:
    def threads() -> int:
        return sum(thread.name == "ludic-reward-model" for thread in threading.enumerate())

    gc.collect()
    first = questions(tmp_path, f"model:{one}", scorer_options={f"model:{one}": {"max_wait_ms": 1}})
    second = questions(tmp_path, [f"model:{one}"], scorer_options={f"model:{one}": {"max_wait_ms": 1, "label": 0}})
    answered(first, "a")
    before = threads()
    answered(second, "b")
    assert threads() == before
    (thread,) = [each for each in threading.enumerate() if each.name == "ludic-reward-model"][-1:]
    del first, second
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("run_in", ["loop", "thread"])
def test_the_load_is_no_part_of_the_time_of_a_score(
    one: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_in: str
) -> None:
    load = reward_model._load

    def slow(*args: Any) -> Any:
        time.sleep(7)
        return load(*args)

    monkeypatch.setattr(reward_model, "_load", slow)
    settings = {"dtype": "float32", "max_batch_tokens": 1000 + len(run_in)}  # no model of another test
    environment = questions(tmp_path, f"model:{one}", run_in=run_in, scorer_options={f"model:{one}": settings})

    async def score() -> float:
        held = await LimitedEnvironments("qa", lambda: environment, TimeLimit(timeout_s=6.0)).open()
        await environment_calls.reset(held, environment.example(0, "train"))
        return (await environment_calls.step(held, "a b")).reward

    assert asyncio.run(score()) == pytest.approx(by_hand(one, "a b")[0], abs=1e-5)


def broken(folder: Path, one: str) -> str:
    """A copy of the model without its head."""
    from safetensors.torch import load_file, save_file

    copy = folder / "broken"
    shutil.copytree(one, copy)
    weights = load_file(copy / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return str(copy)


def test_weights_without_a_head_fail_the_first_score(one: str, tmp_path: Path) -> None:
    environment = questions(tmp_path, f"model:{broken(tmp_path, one)}")
    for _ in range(2):
        with pytest.raises(ModelError, match=r"broken: the weights lack score.weight; the folder is incomplete"):
            answered(environment, "a", "b")


@pytest.mark.slow
def test_what_can_not_heal_is_found_before_the_start(one: str, three: str, tmp_path: Path) -> None:
    policy = make_model(tmp_path / "policy", seed=3)
    silent = tmp_path / "silent"
    shutil.copytree(one, silent)
    (silent / "chat_template.jinja").unlink()
    cases: list[tuple[str, Mapping[str, Any], str]] = [
        ("absent", {}, "absent: there is no such folder, seen from .*, and "),
        (policy, {}, "policy is a Qwen3ForCausalLM, wanted a reward model: one with a head of labels"),
        (str(silent), {}, "silent: the tokenizer has no chat template; take the instruct version"),
        (three, {}, r"the model has 3 labels \(0 LABEL_0, 1 LABEL_1, 2 LABEL_2\), and the score is the logit of one"),
        (three, {"label": 3}, "the model has no label 3; it has 0 LABEL_0, 1 LABEL_1, 2 LABEL_2"),
        (three, {"label": "good"}, "the model has no label 'good'; it has LABEL_0, LABEL_1, LABEL_2"),
        (three, {"minus_label": 1}, "minus_label is given without label"),
        (one, {"device": "gpu"}, "device is 'gpu', wanted cpu, or cuda:N for a GPU"),
        (one, {"device": "cuda:71"}, "device is cuda:71, and this process sees "),
        (one, {"max_lenght": 7}, "setting 'max_lenght' is unknown; did you mean 'max_length'"),
        (one, {"truncate": "both"}, "truncate is 'both', wanted one of 'left', 'right' or None"),
    ]
    for model, settings, said in cases:
        with pytest.raises(ConfigError, match=said):
            questions(tmp_path, f"model:{model}", scorer_options={f"model:{model}": settings})
    with pytest.raises(ConfigError, match=r"run_in is 'process', and each process would load the scorer model:"):
        questions(tmp_path, f"model:{one}", run_in="process")
    with pytest.raises(ConfigError, match=r"scorer_options has 'exact', which is not a reward model among exact"):
        questions(tmp_path, "exact", scorer_options={"exact": {"label": 1}})
    with pytest.raises(ConfigError, match=r"the scorer exact needs a right answer"):
        questions(tmp_path, ["exact", f"model:{one}"], answer=None)


@pytest.mark.slow
def test_stored_rollouts_get_scores(run: ludic.Run, one: str, three: str) -> None:
    report = run.score(f"model:{one}")
    assert (report.scorer, report.num_scored, report.num_failed) == (Path(one).name, 8, 0)
    rows = run.sql("select messages, value, scores.model from rollouts join scores using (rollout_id)").to_dicts()
    for row in rows[:2]:
        messages = [(each["role"], each["content"]) for each in row["messages"]]
        assert row["value"] == pytest.approx(logits_by_hand(one, *messages)[0], abs=1e-4)
        assert row["model"] == one
    again = run.score(f"model:{one}", scorer_options={"device": "cpu", "max_batch_size": 2})
    assert (again.num_scored, again.num_done_before, again.version) == (0, 8, report.version)
    other = run.score(f"model:{one}", scorer_options={"activation": "sigmoid"}, where="episode_reward = 1")
    assert (other.num_scored, other.version == report.version) == (3, False)
    with pytest.raises(ConfigError, match="the model has 3 labels"):
        run.score(f"model:{three}")
    with pytest.raises(ConfigError, match="scorer_options are settings of a reward model"):
        run.score("mine.py:score", scorer_options={"label": 1})
