"""`ludic sample`: answers of a run's policy or of a model, with logprobs."""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_models import forward_logprobs, publish
from tiny_runs import create_root

from ludic.models.chat import load_tokenizer, render_prompt
from ludic.records.rollout import Message
from ludic.root.root import Root

PROMPT = ["--prompt", "aa ab ac", "--max-tokens", "6"]


def answers(ludic, source: str | Path, *args: str) -> dict:
    result = ludic("sample", source, *PROMPT, "--json", *args)
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_the_latest_policy_answers_and_tells_its_logprobs(ludic, trained: Root) -> None:
    printed = answers(ludic, trained.url, "--n", "2")
    assert printed["policy_version"] == 1
    assert len(printed["answers"]) == 2
    folder = trained.at("policies/version=1")
    prompt_tokens = render_prompt(load_tokenizer(folder), [Message(role="user", content="aa ab ac")])
    for answer in printed["answers"]:
        expected = forward_logprobs(folder, prompt_tokens, np.array(answer["tokens"], np.int32))
        assert answer["logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)
        assert answer["mean_logprob"] == pytest.approx(float(expected.mean()), abs=1e-4)
        assert answer["finish_reason"] == "length"
        assert len(answer["tokens"]) == 6


def test_the_seed_decides_and_answers_differ(ludic, trained: Root) -> None:
    first = answers(ludic, trained.url, "--n", "3")
    assert first == answers(ludic, trained.url, "--n", "3")
    assert first != answers(ludic, trained.url, "--n", "3", "--seed", "1")
    assert len({tuple(answer["tokens"]) for answer in first["answers"]}) == 3


def test_a_version_can_be_asked_for(ludic, trained: Root) -> None:
    printed = answers(ludic, trained.url, "--version", "0", "--temperature", "0")
    assert printed["policy_version"] == 0
    model = answers(ludic, trained.record.model, "--temperature", "0")
    assert (model["policy_version"], model["answers"]) == (None, printed["answers"])


def test_a_run_says_how_to_sample_unless_told_otherwise(ludic, trained: Root) -> None:
    # The run samples at most 256 tokens, and the model ends none of its answers before.
    result = ludic("sample", trained.url, "--prompt", "aa", "--json")
    assert len(json.loads(result.out)["answers"][0]["tokens"]) <= 256
    assert answers(ludic, trained.url, "--top-k", "1") == answers(ludic, trained.url, "--top-p", "1e-9")


def test_people_get_text(ludic, trained: Root) -> None:
    result = ludic("sample", trained.url, *PROMPT, "--n", "2")
    assert result.code == 0
    assert [line[:36] for line in result.out.splitlines()[::2]] == [
        "1: 6 tokens, finish_reason length, m",
        "2: 6 tokens, finish_reason length, m",
    ]
    assert result.err == ""


@pytest.mark.slow
def test_a_policy_is_fetched_from_any_filesystem(ludic, root_url: str, model_folder: str, trained: Root) -> None:
    publish(create_root(root_url, model_folder), model_folder, budget=1)
    here = answers(ludic, trained.url, "--version", "0", "--temperature", "0")
    assert answers(ludic, root_url, "--temperature", "0")["answers"] == here["answers"]


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--version", "9"], "holds no weights of version 9; it has 2 from 0 to 1"),
        (["--max-tokens", "100000"], "the model holds 512; lower max_tokens"),
    ],
)
def test_what_can_not_be_sampled_is_explained_in_one_line(ludic, trained: Root, args: list[str], reason: str) -> None:
    result = ludic("sample", trained.url, "--prompt", "aa", *args)
    assert (result.code, result.out) == (1, "")
    assert reason in result.err
    assert result.err.count("\n") == 1


def test_a_run_without_a_policy_points_to_its_model(ludic, started: Root) -> None:
    result = ludic("sample", started.url, *PROMPT)
    assert result.err == (
        f"ludic: {started.url} has published no policy yet; "
        f"`ludic sample {started.record.model}` asks its first model\n"
    )


def test_a_model_has_no_versions(ludic, model_folder: str) -> None:
    result = ludic("sample", model_folder, *PROMPT, "--version", "3")
    said = f"{model_folder} is a model, not a run, so it has no version 3"
    assert (result.code, result.err) == (2, f"ludic: {said}; `ludic sample --help` lists the options\n")


def test_a_folder_that_is_neither_is_explained(ludic, tmp_path: Path) -> None:
    result = ludic("sample", tmp_path, *PROMPT)
    assert result.err == f"ludic: {tmp_path} holds neither a run (run.json) nor a model (config.json)\n"


def test_broken_weights_are_explained_in_one_line(ludic, breakable: Path) -> None:
    (breakable / "policies/version=1/model.safetensors").write_bytes(b"torn")
    result = ludic("sample", breakable, *PROMPT)
    assert result.code == 1
    assert "policies/version=1/model.safetensors does not match its digest" in result.err


def test_no_prompt_is_wrong_usage(ludic, trained: Root) -> None:
    assert ludic("sample", trained.url).code == 2
