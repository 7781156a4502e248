"""`ludic eval` and `ludic compare`: what they print, and how they explain what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_model

from ludic.root.root import Root

SMALL = ("--num-examples", "5", "--n", "2", "--device", "cpu")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("runs") / "evals")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), seed=1)


@pytest.mark.slow
def test_a_model_is_evaluated_without_a_run_and_compared_with_itself(ludic: Any, url: str, model: str) -> None:
    command = ("eval", url, "--model", model, "--env", "addition", "--max-tokens", "8", *SMALL)
    shown = ludic(*command)
    assert shown.code == 0, shown.err
    assert ["0", "addition", "5", "10"] in [line.split()[:4] for line in shown.out.splitlines()]
    assert "pass_at_k" in shown.out
    printed = json.loads(ludic(*command, "--json", "--measures", "mean_reward", "--interval", "clustered").out)
    assert printed["samples"][0]["num_samples"] == 10
    assert [row["measure"] for row in printed["measures"]] == ["mean_reward"]
    assert printed["measures"][0]["interval"] == "clustered"

    # What is stored is measured without sampling.
    stored = json.loads(ludic("eval", url, "--stored", "--json", "--measures", "mean_reward").out)
    assert stored["samples"] == printed["samples"]
    assert stored["measures"][0]["estimate"] == printed["measures"][0]["estimate"]

    compared = ludic("compare", f"{url}@0", "@latest")
    assert compared.code == 0, compared.err
    assert f"baseline {url}@0, paired on the same examples" in compared.out
    (row,) = json.loads(ludic("compare", f"{url}@latest", url, "--json").out)["differences"]
    assert (row["difference"], row["p_holm"], row["num_examples"]) == (0.0, 1.0, 5)

    assert "holds no weights of version 4" in ludic("eval", url, "--versions", "4", *SMALL).err


@pytest.mark.parametrize("flags", [["--n", "2"], ["--model", "m"], ["--trust-code"]])
def test_nothing_that_samples_is_given_where_nothing_is_sampled(ludic: Any, tmp_path: Path, flags: list[str]) -> None:
    said = ludic("eval", tmp_path, "--stored", *flags)
    name = flags[0].removeprefix("--").replace("-", "_")
    assert (said.code, said.err) == (
        2,
        f"ludic: {name} is for sampling, and stored samples nothing; leave out one of them\n",
    )


def test_a_root_that_is_not_there_needs_a_model_and_an_environment(ludic: Any, tmp_path: Path) -> None:
    missing = tmp_path / "none"
    said = ludic("eval", missing)
    assert (said.code, said.out) == (1, "")
    assert said.err == f"ludic: {missing} holds no run; with --model FOLDER_OR_ID, one is made to evaluate it\n"
    said = ludic("eval", missing, "--model", "m")
    assert said.err == (f"ludic: {missing} holds no run, so there are no environments to evaluate m in; give --env\n")
    assert not missing.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--n", "0"], "n is 0, wanted at least 1"),
        (["--versions", "first"], "versions has 'first', wanted a number, latest, or a range"),
        (["--confidence", "1.5"], "confidence is 1.5, wanted at most 0.999999"),
        (["--interval", "normal"], "normal"),
        (["--every", "5", "--versions", "3"], "every (5) and versions (3) contradict each other"),
        (["--until-step", "5"], "until_step has no effect without every"),
        (["--exampels", "3"], "there is no option --exampels"),
    ],
)
def test_a_wrong_flag_is_wrong_usage(ludic: Any, trained: Root, flags: list[str], message: str) -> None:
    said = ludic("eval", trained.url, *flags)
    assert (said.code, said.out) == (2, "")
    assert message in said.err


def test_one_side_is_not_enough(ludic: Any, trained: Root) -> None:
    said = ludic("compare", trained.url)
    assert (said.code, said.out) == (1, "")
    assert said.err == f"ludic: there is nothing to compare {trained.url} with; name two or more runs\n"


def test_a_first_side_without_a_root_is_explained(ludic: Any) -> None:
    assert ludic("compare", "@0", "@1").err == ("ludic: @0 names no root, wanted ROOT@VERSION for the first side\n")


def test_an_empty_root_has_nothing_to_compare(ludic: Any, trained: Root) -> None:
    said = ludic("compare", f"{trained.url}@0", "@1")
    assert said.code == 1
    assert said.err == f"ludic: {trained.url} has no evaluation; `ludic eval {trained.url}` samples one\n"


SUITE = """
max_tokens = 8
num_examples = 3
[[entries]]
name = "sums"
env = "addition"
measures = ["mean_reward"]
[[entries]]
name = "sums twice"
env = "addition"
n = 2
measures = ["avg_at_k"]
params = {k = 2}
"""


@pytest.mark.slow
def test_a_suite_is_measured_by_entry_and_sampled_once(ludic: Any, tmp_path: Path, model: str) -> None:
    root, file = tmp_path / "run", tmp_path / "suite.toml"
    file.write_text(SUITE)
    command = ("eval", root, "--model", model, "--suite", file, "--device", "cpu", "--json")
    said = ludic(*command)
    assert said.code == 0, said.err
    first = json.loads(said.out)
    assert [(row["entry"], row["measure"], row["num_examples"]) for row in first["measures"]] == [
        ("sums", "mean_reward", 3),
        ("sums twice", "avg_at_k", 3),
    ]
    files = sorted((root / "evals").rglob("*.parquet"))
    assert json.loads(ludic(*command).out) == first
    assert sorted((root / "evals").rglob("*.parquet")) == files


def test_a_suite_with_an_unknown_key_is_refused_before_anything_is_made(ludic: Any, tmp_path: Path) -> None:
    root, file = tmp_path / "run", tmp_path / "suite.toml"
    file.write_text(SUITE.replace("n = 2", "samples = 2"))
    said = ludic("eval", root, "--model", "m", "--suite", file)
    assert (said.code, said.out) == (1, "")
    assert str(file) in said.err
    assert "samples" in said.err
    assert not root.exists()


@pytest.mark.slow
def test_contamination_counts_what_the_steps_trained_on(ludic: Any, breakable: Path) -> None:
    said = ludic("contamination", breakable)
    assert (said.code, said.out) == (1, "")
    assert "has no evaluation" in said.err
    assert ludic("eval", breakable, "--max-tokens", "4", *SMALL).code == 0
    found = json.loads(ludic("contamination", breakable, "--params", '{"n": 2}', "--json").out)
    assert found["num_trained"] == 8  # two groups of four
    assert found["num_absent"] == 0
    assert found["total"][0]["num_examples"] == 5
    said = ludic("contamination", breakable)
    assert said.code == 0
    assert "with overlap" in said.out
    assert "parameter 'm' is unknown" in ludic("contamination", breakable, "--params", '{"m": 3}').err
