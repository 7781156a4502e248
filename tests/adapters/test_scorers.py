"""Reward functions of TRL and verl as scorers of questions: called as their programs call them."""

import asyncio
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ludic.environments.environment import Environment, GroupAnswer, Transition
from ludic.environments.registry import make_environment
from ludic.errors import ConfigError, ScorerError

REWARDS = """
import asyncio

import numpy as np

calls = []

def accuracy(completions, solution, **kwargs):
    return [float(text == right) for text, right in zip(completions, solution)]

def last(completions, **kwargs):
    return [completion[-1]["content"] for completion in completions]

def seen(prompts, completions, **kwargs):
    calls.append((prompts, completions, {name: each for name, each in kwargs.items() if not callable(each)}))
    return np.array([1.5] * len(completions))

def strict(completions, level):
    return [10 * level[0]]

async def judged(completions, log_metric, log_extra, **kwargs):
    await asyncio.sleep(0)
    log_metric("mean_length", 2)
    log_extra("verdict", ["fine" for _ in completions])
    return [0.25 for _ in completions]

def undecided(completions, **kwargs):
    return [None for _ in completions]

def not_a_number(completions, **kwargs):
    return [float("nan") for _ in completions]

def rank(completions, **kwargs):
    order = sorted(completions, key=len)
    return [float(order.index(each)) for each in completions]

def single(completions, **kwargs):
    return 1.0

def many(completions, **kwargs):
    return [1.0, 2.0]

def by_tokens(completions, completion_ids, **kwargs):
    return [0.0]

def by_step(completions, trainer_state=None):
    return [0.0 if trainer_state is None else 1.0]

class Callable:
    async def __call__(self, completions, **kwargs):
        return [7.0]

instance = Callable()
"""


@pytest.fixture
def answer(tmp_path: Path) -> Callable[..., Transition]:
    """answer(function, text, row, ...): the transition of a text as the answer to a row, scored by a function."""

    def score(function: str, text: str = "4", *, row: dict[str, Any] | None = None, **options: Any) -> Transition:
        environment = made(tmp_path, function, row, **options)
        environment.reset(environment.example(0, "train"))
        found = environment.step(text)
        return asyncio.run(found) if inspect.isawaitable(found) else found

    return score


def made(folder: Path, scorer: str | list[str], row: dict[str, Any] | None = None, **options: Any) -> Environment:
    (folder / "rewards.py").write_text(REWARDS)
    row = row or {"prompt": "2 + 2 = ?", "solution": "4", "level": 3}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    if isinstance(scorer, str):
        scorer = scorer.replace("rewards.py", str(folder / "rewards.py"))
    return make_environment(f"qa/{folder}/rows.jsonl", {"scorer": scorer, "heldout_share": 0, **options})()


def calls_of(environment: Environment) -> list[Any]:
    function = environment.environment._scorers.score.args[0].__self__.function
    return function.__globals__["calls"]


def test_a_function_of_trl_gets_texts_and_every_column_by_its_name(tmp_path):
    environment = made(tmp_path, "trl:rewards.py:seen", system_prompt="Be brief.")
    environment.reset(environment.example(0, "train"))
    assert environment.step("four").reward == 1.5
    ((prompts, completions, columns),) = calls_of(environment)
    assert (prompts, completions) == (["2 + 2 = ?"], ["four"])
    assert columns == {"solution": ["4"], "level": [3]}


def test_a_function_of_trl_gets_messages_if_the_prompts_are_messages(tmp_path):
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2 = ?"}]
    environment = made(tmp_path, "trl:rewards.py:seen", {"prompt": prompt, "solution": "4"})
    environment.reset(environment.example(0, "train"))
    environment.step("four")
    ((prompts, completions, _),) = calls_of(environment)
    assert prompts == [prompt]
    assert completions == [[{"role": "assistant", "content": "four"}]]


SCRIPT = """
from trl import GRPOConfig, GRPOTrainer

def accuracy(completions, **kwargs):
    return [1.0] * len(completions)

{start}
"""


@pytest.mark.parametrize(
    ("start", "line"),
    [
        ("GRPOTrainer(model='m', reward_funcs=accuracy).train()", 7),
        ("trainer = GRPOTrainer(model='m', reward_funcs=accuracy)\nfor _ in range(2):\n    trainer.train()", 9),
        ("import ludic\nrun = ludic.grpo(model='m', reward=accuracy, root='r')", 8),
    ],
)
def test_a_script_that_starts_a_training_is_refused_and_does_not_run(tmp_path: Path, start: str, line: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(start=start))
    with pytest.raises(
        ConfigError, match=rf"script\.py, line {line}, starts a training .*accuracy into a file of its own"
    ):
        made(tmp_path, f"trl:{tmp_path}/script.py:accuracy")


def test_a_script_whose_start_is_in_its_main_part_is_as_good_as_a_file_of_rewards(tmp_path: Path) -> None:
    text = SCRIPT.replace("from trl", "if False:\n    from trl")  # trl is not installed here
    start = 'if __name__ == "__main__":\n    GRPOTrainer(model="m").train()'
    (tmp_path / "script.py").write_text(text.format(start=start))
    environment = made(tmp_path, f"trl:{tmp_path}/script.py:accuracy")
    environment.reset(environment.example(0, "train"))
    assert environment.step("4").reward == 1


@pytest.mark.parametrize(("answer", "wanted"), [("4", "4"), (4, "4"), (["4", "four"], '["4","four"]'), ("", None)])
def test_a_column_of_answers_is_the_wanted_answer_also_where_the_program_has_none(tmp_path, answer, wanted) -> None:
    environment = made(tmp_path, "trl:rewards.py:seen", {"prompt": "2 + 2 = ?", "answer": answer})
    assert environment.example(0, "train").wanted == wanted


@pytest.mark.parametrize(
    ("function", "reward"),
    [("accuracy", 1.0), ("strict", 30.0), ("judged", 0.25), ("by_step", 0.0), ("instance", 7.0)],
)
def test_what_a_function_of_trl_returns_for_the_answer_is_its_reward(answer, function: str, reward: float):
    assert answer(f"trl:rewards.py:{function}").reward == reward


def test_what_a_function_of_trl_logs_is_kept_with_the_answer(answer):
    transition = answer("trl:rewards.py:judged")
    assert (transition.reward_components, transition.info) == ({"mean_length": 2.0}, {"verdict": "fine"})


@pytest.mark.parametrize("function", ["undecided", "not_a_number"])
def test_none_and_nan_leave_an_answer_unscored(answer, function: str):
    with pytest.raises(ScorerError, match=rf"trl:.*:{function} returned None, so the answer is not scored"):
        answer(f"trl:rewards.py:{function}")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("single", "single returned 1.0, wanted a list with a number or None for each completion"),
        ("many", "many returned 2 rewards, wanted one for each of 1 completions"),
        ("last", r"last returned \['4'\], wanted a list with a number"),
    ],
)
def test_what_is_no_list_of_rewards_is_named(answer, function: str, message: str):
    row = {"prompt": [{"role": "user", "content": "2 + 2 = ?"}]} if function == "last" else None
    with pytest.raises(ScorerError, match=message):
        answer(f"trl:rewards.py:{function}", row=row)


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        (
            "trl:rewards.py:by_tokens",
            "by_tokens wants completion_ids: environments see no tokens; ludic punishes length",
        ),
        ("trl:rewards.py:acuracy", r"rewards\.py has no function 'acuracy'; it has .*accuracy"),
        ("trl:accuracy", r"scorer 'trl:accuracy' is unknown; .* your own is path/to/file\.py:function"),
        ("trl:verl:rewards.py:accuracy", "is unknown|no file"),
    ],
)
def test_a_function_that_can_not_be_called_is_refused_at_once(tmp_path, scorer: str, message: str):
    with pytest.raises(ConfigError, match=message):
        made(tmp_path, scorer)


def test_a_row_that_lacks_a_column_has_none_as_in_a_dataset(tmp_path):
    (tmp_path / "rewards.py").write_text(
        "def score(completions, level, **kwargs):\n    return [float(level[0] is None)]\n"
    )
    rows = [{"prompt": "a", "level": 1}, {"prompt": "b"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"scorer": f"trl:{tmp_path}/rewards.py:score", "heldout_share": 0}
    environment = make_environment(f"qa/{tmp_path}/rows.jsonl", options)()
    rewards = {}
    for index in range(2):
        example = environment.example(index, "train")
        environment.reset(example)
        rewards[example.messages[0].content] = environment.step("x").reward
    assert rewards == {"a": 0.0, "b": 1.0}


def test_a_group_of_answers_is_one_call_of_a_function_of_trl(tmp_path):
    environment = made(tmp_path, "numeric", answer="solution", question="prompt")
    assert not hasattr(environment, "score_group")
    options = {"answer": "solution", "group_scorer": f"trl:{tmp_path}/rewards.py:rank"}
    environment = made(tmp_path, "numeric", **options)
    answers = [
        GroupAnswer(text=text, reward=0.0, components={}, messages=(), group_index=index, agent_id="agent")
        for index, text in enumerate(["four", "4", "cats!"])
    ]
    example = environment.example(0, "train")
    assert [score.reward for score in environment.score_group(example, answers)] == [1.0, 0.0, 2.0]
    environment = made(tmp_path, "numeric", **{**options, "group_scorer": f"trl:{tmp_path}/rewards.py:undecided"})
    with pytest.raises(ScorerError, match="undecided returned None for 3 of 3 answers, wanted a number for each"):
        environment.score_group(example, answers)


def test_ludics_own_scorers_say_what_column_they_need_beside_one_of_trl(tmp_path):
    scorers = ["numeric", f"trl:{tmp_path}/rewards.py:accuracy"]
    with pytest.raises(ConfigError, match="the scorer numeric needs a right answer; name its column with the option"):
        made(tmp_path, scorers)
    environment = made(tmp_path, scorers, answer="solution")
    environment.reset(environment.example(0, "train"))
    components = environment.step("it is 4").reward_components
    assert components == {"numeric": 1.0, "numeric.correct": 1.0, "accuracy": 0.0}


# --- verl ----------------------------------------------------------------------------------------------------

COMPUTE_SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k"
    is_right = solution_str.endswith(f"#### {ground_truth}")
    shown = f"{extra_info['index']} of {extra_info['split']}, {extra_info['num_turns']} turns"
    return {"score": is_right - 0.5 * (ground_truth not in solution_str), "acc": is_right, "shown": shown}

def plain(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str in ground_truth["target"])

async def later(data_source, solution_str, ground_truth, extra_info=None):
    return True

def wrong(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}
"""
ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2 + 2 = ?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 7},
}


@pytest.fixture
def verl(tmp_path: Path) -> Callable[..., Transition]:
    """verl(function, text, row): the transition of an answer to a row of a Parquet file that verl's scripts write."""

    def score(function: str, text: str, row: dict[str, Any] = ROW) -> Transition:
        (tmp_path / "rewards.py").write_text(COMPUTE_SCORE)
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
        options = {"scorer": f"verl:{tmp_path}/rewards.py:{function}", "heldout_share": 0}
        environment = make_environment(f"qa/{tmp_path}/train.parquet", options)()
        environment.reset(environment.example(0, "train"))
        found = environment.step(text)
        return asyncio.run(found) if inspect.isawaitable(found) else found

    return score


def test_a_compute_score_of_verl_scores_a_row_of_verl(verl):
    transition = verl("compute_score", "2 and 2 is #### 4")
    assert (transition.reward, transition.reward_components) == (1.0, {"acc": 1.0})
    assert transition.info == {"shown": "7 of train, 2 turns"}
    assert verl("compute_score", "five").reward == -0.5
    assert verl("compute_score", "4").reward == 0.0


def test_a_ground_truth_of_any_type_reaches_verls_function(verl):
    row = {**ROW, "reward_model": {"style": "rule", "ground_truth": {"target": ["four", "4"]}}}
    assert [verl("plain", text, row).reward for text in ("four", "five")] == [1.0, 0.0]


def test_a_coroutine_of_verl_is_awaited_and_a_bool_is_a_number(verl):
    assert verl("later", "x").reward == 1.0


def test_a_result_without_a_score_is_named(verl):
    with pytest.raises(ScorerError, match=r"verl:.*:wrong returned {'acc': 1.0}, wanted a number, or a dict with a"):
        verl("wrong", "x")


def test_scores_in_a_process_are_those_of_here(tmp_path: Path):
    environment = made(tmp_path, "trl:rewards.py:accuracy", run_in="process")
    environment.reset(environment.example(0, "train"))
    found = environment.step("4")
    assert inspect.isawaitable(found)
    assert asyncio.run(found).reward == 1.0
