"""One call trains: the snippet of README as a script, the cells of a notebook, data sets, rewards, and mistakes."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import nbformat
import polars as pl
import pyarrow as pa
import pytest
from forks import Forked
from notebook_cells import execute_cells

import ludic
from ludic.adapters.imports.forms import conversations, pairs
from ludic.app.launch.fork_server import StartServer
from ludic.app.operations import fit_inputs
from ludic.app.operations.fit import _has_heldout, _keep_columns, _server_started_early
from ludic.app.operations.fit_inputs import Inputs, QuestionSet, named_rewards, rows_of, write_questions, write_rewards
from ludic.base.defaults import Track
from ludic.environments.registry import make_environment
from ludic.errors import ConfigError, LudicError, SchemaError
from ludic.models.tiny import make_tiny_model
from ludic.run.run_json import located, put_run

WORDS = ["red", "blue", "green", "yellow", "white", "black", "pink", "brown"]
QUESTIONS = [{"question": f"say the word {a} {b}", "answer": a} for a in WORDS for b in WORDS]
MODEL = "Qwen/Qwen3-0.6B"
"""The snippet's model: a tiny one stands in the Hub's cache under this name."""
SETTINGS = (
    'num_steps=2, max_tokens=2, group_size=2, groups_per_batch=2, accept_incomplete=True, device="cpu", '
    'eval_options={"num_examples": 4}'
)
"""Added to the calls, so that they end in seconds."""


def readme_snippet() -> str:
    text = Path(__file__).parents[3].joinpath("docs", "fit.md").read_text(encoding="utf-8")
    (found,) = [part for part in text.split("```python\n") if 'root="runs/mine")' in part and "report.html" in part]
    return found.partition("```")[0]


def with_settings(text: str) -> str:
    return text.replace('root="runs/mine")', f'root="runs/mine", {SETTINGS})')


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the Hub with the model, as a download leaves it."""
    folder = tmp_path_factory.mktemp("hub")
    home = folder / f"models--{MODEL.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40)
    words = [f"{a}{b}{c}" for a in "abcd" for b in "aeiou" for c in "klmn"]
    make_tiny_model(str(home / "snapshots" / ("0" * 40)), [*words, "say the word", *WORDS])
    return folder


@pytest.fixture
def folder(tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with questions.jsonl, for processes that have no network."""
    (tmp_path / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in QUESTIONS))
    for name, value in {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def script(folder: Path, text: str, *args: str, name: str = "train.py") -> str:
    """What a script prints."""
    (folder / name).write_text(dedent(text))
    done = subprocess.run([sys.executable, name, *args], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def put_model(folder: Path) -> None:
    """For forked processes: they read the place of the Hub's cache before the test named its own."""
    snapshot = Path(os.environ["HF_HUB_CACHE"], f"models--{MODEL.replace('/', '--')}", "snapshots", "0" * 40)
    shutil.copytree(snapshot, folder / MODEL)


def forked_script(folder: Path, text: str) -> tuple[str, str]:
    """What a script prints and logs, in a forked process that finds the model in its folder, without the Hub."""
    (folder / "train.py").write_text(dedent(text))
    put_model(folder)
    process = Forked(["train.py"], folder / "err", out=folder / "out", cwd=folder)
    out, err = process.communicate(500)
    assert process.returncode == 0, err
    return out, err


def test_readme_and_guide_have_the_same_snippet() -> None:
    readme = Path(__file__).parents[3].joinpath("README.md").read_text(encoding="utf-8")
    lines = [line for line in readme_snippet().splitlines() if line]
    assert len(lines) == 6
    assert "\n".join(f"    {line}" for line in lines) in readme.replace("\n\n    ", "\n    ")


# --- Whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_snippet_runs_as_written(folder: Path) -> None:
    script(folder, 'print("once")\n' + with_settings(readme_snippet()))
    assert "training" in (folder / "report.html").read_text(encoding="utf-8")
    run = ludic.open(folder / "runs" / "mine")
    steps = run.sql("select step, count(*) as n from batches where used group by step order by step")
    assert steps.to_dicts() == [{"step": 1, "n": 4}, {"step": 2, "n": 4}]
    assert set(run.eval(stored=True).frame("samples")["policy_version"]) == {0, 2}
    assert run.verify().findings == []
    check_that_only_the_script_started_a_run(folder)


def check_that_only_the_script_started_a_run(folder: Path) -> None:
    code = (folder / "runs" / "mine" / "inputs" / "reward.py").read_text()
    assert "def reward" in code
    for left_out in ("ludic.grpo", "once", "__main__"):
        assert left_out not in code
    assert not any("once" in log.read_text() for log in (folder / "runs" / "mine" / "logs").iterdir())


@pytest.mark.slow
def test_with_a_main_part_and_in_the_background_it_goes_on_after_the_script(folder: Path) -> None:
    head, call = with_settings(readme_snippet().partition("run.report")[0]).split("run = ludic.grpo", 1)
    call = f"ludic.grpo{call}".replace(SETTINGS, f"{SETTINGS}, wait=False")
    forked_script(folder, f'print("once")\n{head}if __name__ == "__main__":\n{indent(call, "    ")}')
    log = folder / "runs" / "mine" / "logs" / "run.log"
    while "trained to step 2 of 2" not in log.read_text():
        assert "ludic: " not in log.read_text()
        time.sleep(0.2)
    run = ludic.open(folder / "runs" / "mine")
    assert set(run.eval(stored=True).frame("samples")["policy_version"]) == {0, 2}
    check_that_only_the_script_started_a_run(folder)


CELLS = (
    """
    import re
    import ludic
    NAMES, BONUS = ["red"], 0.5
    PATTERN = re.compile("r.d")
    """,
    """
    def judged(text, bonus=BONUS):
        return bonus * bool(PATTERN.search(text))

    def helper(text): return judged(text) + (text in NAMES)
    """,
    f"""
    questions = [{{"prompt": f"say the word {{a}} {{b}}", "answer": a}} for a in {WORDS} for b in {WORDS}]
    def reward(completion, answer): return 1 + helper(completion)
    def train(steps, reward):
        return ludic.grpo(model="{MODEL}", dataset=questions, reward=reward, root="runs/mine", eval_every=None,
                          {SETTINGS.partition(", eval_options")[0]}, **{{"num_steps": steps}})
    """.replace("num_steps=2, ", ""),
    "run = train(2, reward); run",
    "run = train(2, reward); run.sql('select max(step) as s, max(attempt_id) as a from batches').rows()",
    "def reward(completion, answer): return 7 + helper(completion)",
    "run = train(4, reward); run.sql('select min(episode_reward), max(episode_reward) from rollouts').rows()",
    "engine = object()\ndef reward(completion): return engine.ask(completion)",
    "try:\n    train(5, reward)\nexcept ludic.errors.ConfigError as error:\n    print(error)",
)


@pytest.mark.slow
@pytest.mark.timeout(900)  # four runs, one after the other
def test_cells_of_a_notebook_resume_and_take_a_changed_reward(folder: Path) -> None:
    cells = [nbformat.v4.new_code_cell(dedent(cell)) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    put_model(folder)
    execute_cells(notebook, folder, timeout_s=800)
    found = [
        [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.get("outputs", [])]
        for cell in notebook.cells
    ]
    panel = [each["data"] for each in notebook.cells[3].outputs if "step" in each.get("data", {}).get("text/html", "")]
    assert panel, found[3]
    assert "[(2, 1)]" in found[4][-1]  # nothing was left to do
    assert "the rewards have changed" in "".join(found[6])
    assert "num_steps was 2 and is 4" in "".join(found[6])
    low, high = eval(found[6][-1])[0]
    assert 1 <= low <= 2.5
    assert high >= 7
    assert "'engine', which a function uses, is of type object" in "".join(found[8])
    run = ludic.open(folder / "runs" / "mine")
    assert len(list((folder / "runs" / "mine" / "code").glob("*.json"))) == 2  # the list of texts was renewed once
    assert run.verify().findings == []


@pytest.mark.slow
def test_an_agent_that_makes_its_own_calls_is_trained_and_evaluated(folder: Path) -> None:
    (folder / "agent.py").write_text(
        dedent("""
        async def run(example, client, model):
            said = await client.chat.completions.create(model=model, messages=example["messages"])
            return f"{said.choices[0].message.content} and red"
        """)
    )
    forked_script(
        folder,
        f"""
        import ludic
        def reward(completion: str, answer: str) -> float:
            return float(completion.endswith(" and red"))
        ludic.grpo(model="{MODEL}", dataset="questions.jsonl", reward=reward, root="runs/mine", agent="agent.py:run",
                   {SETTINGS.replace("accept_incomplete=True, ", "")})
        """,
    )
    run = ludic.open(folder / "runs" / "mine")
    for view in ("rollouts", "evals"):
        assert run.sql(f"select distinct episode_reward from {view}")["episode_reward"].to_list() == [1.0]
    assert run.sql("select count(*) as n from calls where event = 'call'")["n"].to_list()[0] >= 8


@pytest.mark.slow
def test_several_rewards_are_components_and_one_may_see_the_group(folder: Path) -> None:
    forked_script(
        folder,
        f"""
        import ludic
        def right(completion: str, answer: str) -> float:
            return float(answer in completion)
        async def length(completion):
            return len(completion)
        def rank(completions, question):
            assert question.startswith("say the word")
            return [index for index, _ in enumerate(completions)]
        def first(completions):
            return [index == 0 for index, _ in enumerate(completions)]
        rewards = {{"right": right, "length": (length, 0), "rank": (rank, 0.5), "first": (first, 0)}}
        ludic.grpo(model="{MODEL}", dataset="questions.jsonl", reward=rewards, root="runs/mine",
                   heldout=0.5, system_prompt="say", eval_every=None, {SETTINGS.partition(", eval_options")[0]})
        """,
    )
    run = ludic.open(folder / "runs" / "mine")
    rows = run.sql(
        "select episode_reward, reward_components as c, group_index, messages, correct from rollouts"
    ).to_dicts()
    assert rows
    for row in rows:
        parts = {each["key"]: each["value"] for each in row["c"]} if isinstance(row["c"], list) else row["c"]
        assert parts["rank"] == row["group_index"]
        assert row["episode_reward"] == pytest.approx(parts["right"] + 0.5 * parts["rank"])
        assert parts["length"] == len(row["messages"][-1]["content"])
        assert row["messages"][0]["content"] == "say"
        assert row["correct"] == (row["group_index"] == 0)
    assert run.root.folders("evals") == []


@pytest.mark.slow
@pytest.mark.timeout(900)  # three runs, one after the other
def test_runs_on_the_same_rows_are_compared_and_go_on_from_elsewhere(folder: Path) -> None:
    call = f"""
        import ludic
        rows = [{{"question": f"say the word {{a}}", "answer": a, "level": b}} for a in {WORDS} for b in range(4)]
        def reward(completion, answer): return len(completion) + (completion == answer)
        def train(root, steps):
            return ludic.grpo(model="{folder / MODEL}", dataset=rows, reward=reward, root=root, num_steps=steps,
                              {SETTINGS.partition(", ")[2]})
        """
    forked_script(folder, dedent(call) + 'train("runs/lr1", 1)\ntrain("runs/lr2", 1)\n')
    with_both = ludic.open(folder / "runs" / "lr1").compare("latest", f"{folder / 'runs' / 'lr2'}@latest")
    assert with_both.warnings == []
    assert with_both.differences["num_examples"].to_list() == [4]
    table = ludic.compare([str(folder / "runs")])
    assert table.frame("differences").equals(with_both.differences)
    assert table.runs is not None
    assert list(table.runs.differing) == []  # the same settings, rows and rewards, in roots of their own
    (env,) = set(with_both.differences["env_name"])
    assert re.fullmatch(r"qa/questions-[0-9a-f]{8}", env)
    # Of four rows with one question each is an example, with its own level.
    first = ludic.open(folder / "runs" / "lr1")
    heldout = first.sql(
        "select count(distinct env_example_id), count(distinct (env_example_id, level)), count(level) = count(*) "
        "from (select env_example_id, example_columns->>'level' as level from evals)"
    )
    assert heldout.rows() == [(4, 4, True)]
    levels = first.sql(
        "select example_columns->>'level' as level, count(*) as n, avg(episode_reward) from rollouts group by 1"
    )
    assert levels["n"].sum() >= 4  # workers may sample ahead
    assert set(levels["level"]) <= set("0123")
    assert "Reward by level" in first.report(by="level").html
    (folder / "elsewhere").mkdir()
    shutil.move(folder / "runs" / "lr1", folder / "elsewhere" / "moved")
    forked_script(folder / "elsewhere", dedent(call) + 'train("moved", 2)\n')
    run = ludic.open(folder / "elsewhere" / "moved")
    assert run.sql("select max(step) as step, max(attempt_id) as attempt from batches").rows() == [(2, 2)]
    # Versions 0 and 1 were evaluated before the move, and count for the same evaluation.
    assert run.sql(
        "select version, count(distinct evaluation) from eval_episodes group by all order by all"
    ).rows() == [
        (0, 1),
        (1, 1),
        (2, 1),
    ]
    assert run.verify().findings == []


@pytest.mark.slow
def test_conversations_and_pairs_are_trained_on_without_workers(folder: Path) -> None:
    out, _ = forked_script(
        folder,
        f"""
        import json
        import ludic
        words = {WORDS}
        def figures(run):
            rows = run.sql("select step, loss from metrics where kind = 'train' order by step").rows()
            used = run.sql("select count(distinct group_id) as n, count(*) as m from batches where used").rows()
            return rows, used[0]
        settings = dict(model="{MODEL}", device="cpu", learning_rate=1e-2)
        rows = [{{"prompt": f"say the word {{a}}", "completion": a}} for a in words]
        run = ludic.sft(dataset=rows, root="runs/sft", epochs=4, **settings)
        answers = [run.sample(f"say the word {{a}}", temperature=0, max_tokens=4)[0].text for a in words]
        def chat_of(a):
            return [{{"role": "user", "content": "say"}}, {{"role": "assistant", "content": a}}]
        chats = [{{"messages": chat_of(a)}} for a in words]
        chat = ludic.sft(dataset=chats, root="runs/chat", **settings)
        both = [(a, b) for a in words for b in words[:2] if a != b]
        pairs = [{{"prompt": f"say the word {{a}}", "chosen": a, "rejected": b}} for a, b in both]
        dpo = ludic.dpo(dataset=pairs, root="runs/dpo", **settings)
        again = ludic.dpo(dataset=pairs, root="runs/dpo", **settings)
        try:
            ludic.dpo(dataset=pairs[:2], root="runs/dpo", **settings)
        except ludic.errors.ConfigError as error:
            refused = str(error)
        print(json.dumps([figures(run), answers, figures(chat), figures(dpo), refused]))
        """,  # noqa: S608
    )
    sft, answers, chat, dpo, refused = json.loads(out.splitlines()[-1])
    assert [step for step, _ in sft[0]] == [1, 2, 3, 4]
    assert sft[0][-1][1] < sft[0][0][1]
    assert sft[1] == [8, 4 * 8]
    assert len(answers) == 8
    assert (len(chat[0]), chat[1]) == (1, [8, 8])
    # 14 pairs of two rows, 8 pairs a step; before the first step policy and reference agree: -log(1/2).
    assert dpo[1] == [14, 28]
    assert len(dpo[0]) == 2
    assert dpo[0][0][1] == pytest.approx(0.6931, abs=1e-3)
    assert dpo[0][1][1] != dpo[0][0][1]
    assert "runs/dpo holds the rows of another data set" in refused


@pytest.mark.parametrize(
    ("train", "columns", "num_records"), [(ludic.sft, ("completion",), 8), (ludic.dpo, ("chosen", "rejected"), 16)]
)
def test_the_preparation_of_rows_is_shown_and_rows_that_are_left_out_are_named(
    hub: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    train: Any,
    columns: Sequence[str],
    num_records: int,
) -> None:
    shown: list[tuple[str, int | None]] = []

    @contextmanager
    def progress_bar() -> Iterator[Track]:
        yield lambda items, total, description: (shown.append((description, total)), items)[1]

    monkeypatch.setattr("ludic.base.progress_bar", progress_bar)
    monkeypatch.setattr("ludic.app.operations.start.train", lambda *args, **options: None)
    rows = [{"prompt": "say", **{column: f"{word} {column}" for column in columns}} for word in WORDS]
    for column in columns:  # the chat template shows no calls
        function = {"name": column, "arguments": {}}
        rows[5][column] = [{"role": "assistant", "content": "", "tool_calls": [{"function": function}]}]
    rows[2]["prompt"] = [{"role": "user", "content": "say", "mood": "calm"}]
    train(
        model=hub / f"models--{MODEL.replace('/', '--')}" / "snapshots" / ("0" * 40),
        dataset=rows,
        root=tmp_path / "run",
    )
    assert shown == [("files to import", 1), ("records", num_records), ("files", 1)]
    assert "1 of the rows can't be used; the first is row 5: " in caplog.text
    assert f"fields of messages that are not used: messages[].mood ({num_records // 8})" in caplog.text


# --- Data sets -------------------------------------------------------------------------------------------------------


class Hub:
    """Stands for a datasets.Dataset: `to_list` is all that is asked of one."""

    def to_list(self) -> list[dict[str, Any]]:
        return [{"a": 1, "b": None}]


@pytest.mark.parametrize(
    "dataset",
    [
        [{"a": 1}, {"b": "x"}],
        pl.DataFrame({"a": [1, None], "b": [None, "x"]}),
        pa.table({"a": [1, None], "b": [None, "x"]}),
    ],
)
def test_rows_of_lists_and_tables_have_all_columns(dataset: Any) -> None:
    assert rows_of(dataset) == [{"a": 1, "b": None}, {"a": None, "b": "x"}]


def test_what_is_no_table_is_refused_and_the_index_of_pandas_is_no_column() -> None:
    pd, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    frame = pd.DataFrame({"a": [1, 2]}, index=[5, 3])
    assert rows_of(frame) == [{"a": 1}, {"a": 2}]
    for wrong, reason in (
        (pd.DataFrame({"a": ["x", ["y"]]}), r"no table that Arrow can hold .* give a list of dicts, as of DataFrame"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "no table that Arrow can hold"),
        (pa.table([[1], [2]], names=["a", "a"]), "two columns 'a'"),
        (datasets.Dataset.from_list([{"a": 1}]).to_iterable_dataset(), "is streamed"),
    ):
        with pytest.raises(ConfigError, match=reason):
            rows_of(wrong)


def test_rows_of_pandas_and_datasets() -> None:
    pd = pytest.importorskip("pandas")
    assert rows_of(pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    assert rows_of(Hub()) == [{"a": 1, "b": None}]
    with pytest.raises(ConfigError, match=r"dataset has the splits train, test; give one, such as dataset\['train'\]"):
        rows_of({"train": Hub(), "test": Hub()})


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ([], r"dataset has no rows"),
        ([3], r"dataset, row 0 is 3, wanted a dict"),
        (7, r"dataset is 7, wanted a file"),
        ({"question": ["a"]}, r"dataset is {'question': \['a'\]}, wanted a file"),
        (
            [{"text": "a"}],
            r"the data set has the columns text, and none of question, prompt, messages.*dataset_options",
        ),
        ([{"prompt": object()}], r"the data set, row 0: .*object.*; wanted what JSON can hold"),
        ("absent.jsonl", r"absent.jsonl can't be read"),
    ],
)
def test_data_sets_that_are_none_are_refused(tmp_path: Path, dataset: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        write_questions(Inputs.of(str(tmp_path)), dataset, {})


def test_the_question_and_the_answer_are_found_by_their_names(tmp_path: Path) -> None:
    inputs = Inputs.of(str(tmp_path))

    def found(row: Mapping[str, Any], **options: Any) -> tuple[str, str | None]:
        questions = write_questions(inputs, [row], options)
        assert questions.columns == tuple(row)
        return questions.question, questions.answer

    assert found({"question": "q", "answer": 7}) == ("question", "answer")
    assert found({"prompt": "q", "question": "r"}) == ("question", None)
    assert found({"messages": [{"role": "user", "content": "q"}], "answer": [1]}) == ("messages", None)
    assert found({"text": "q", "answer": "a"}, question="text") == ("text", "answer")


def messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, texts, strict=False)]


def trained(record: Mapping[str, Any]) -> list[tuple[str, str, bool | None]]:
    return [(each["role"], each["content"], each.get("trainable")) for each in record["messages"]]


def test_rows_become_conversations() -> None:
    rows = [{"messages": messages("q", "a")}, {"prompt": "q", "completion": "a"}]
    (first,), (second,) = (conversations([row], "x").records for row in rows)
    assert trained(first) == [("user", "q", None), ("assistant", "a", None)]
    assert trained(second) == [("user", "q", False), ("assistant", "a", True)]
    assert [each["group_id"] for each in conversations(rows[:1] * 2, "x").records] == ["0", "1"]
    assert second["episode_reward"] == 1.0
    with pytest.raises(ConfigError, match=r"x, row 0 fits no form; its fields are text; the forms are messages "):
        conversations([{"text": "a"}], "x")


def test_rows_become_pairs_also_without_a_prompt_of_their_own() -> None:
    long = messages("q", "a", "r")
    rows: list[dict[str, Any]] = [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"chosen": [*long, *messages("", "yes")[1:]], "rejected": [*long, *messages("", "no")[1:]]},
    ]
    found = [(each["group_id"], each["episode_reward"], trained(each)) for each in pairs(rows, "x").records]
    begun = [("user", "q", False), ("assistant", "a", False), ("user", "r", False)]
    assert found == [
        ("0", 1.0, [("user", "q", False), ("assistant", "a", True)]),
        ("0", 0.0, [("user", "q", False), ("assistant", "b", True)]),
        ("1", 1.0, [*begun, ("assistant", "yes", True)]),
        ("1", 0.0, [*begun, ("assistant", "no", True)]),
    ]
    with pytest.raises(
        ConfigError, match=r"x, row 0 has no prompt, and chosen and rejected do not begin with the same"
    ):
        pairs([{"chosen": "a", "rejected": "b"}], "x")


# --- Mistakes --------------------------------------------------------------------------------------------------------


def reward(completion: str) -> float:
    return 1.0


def test_rewards_get_names_and_weights() -> None:
    assert named_rewards(reward) == {"reward": (reward, 1.0)}
    assert named_rewards([reward, len]) == {"reward": (reward, 1.0), "len": (len, 1.0)}
    assert named_rewards({"a": (reward, 0), "b": reward}) == {"a": (reward, 0.0), "b": (reward, 1.0)}
    assert named_rewards(["math", reward]) == {"math": ("math", 1.0), "reward": (reward, 1.0)}
    assert named_rewards([("math", 0.5), (reward, 2)]) == {"math": ("math", 0.5), "reward": (reward, 2.0)}
    assert named_rewards({"exact": 0, "a": (reward, 2)}) == {"exact": ("exact", 0.0), "a": (reward, 2.0)}
    assert named_rewards({"a": "math", "b": ("exact", 0.5)}) == {"a": ("math", 1.0), "b": ("exact", 0.5)}
    with pytest.raises(
        ConfigError, match=r"reward a is \(<function .*, 'x'\), wanted a function, the name of a scorer"
    ):
        named_rewards({"a": (reward, "x")})
    with pytest.raises(ConfigError, match=r"two rewards have the same name"):
        named_rewards([reward, reward])


def short(completion: str) -> float:
    return 10 - len(completion)


def environment_of(inputs: Inputs, questions: QuestionSet, options: Mapping[str, Any]) -> Any:
    """The environment as a process of the run makes it: the root says where its data is."""
    own = {**options, **questions.stored, "heldout_share": 0}
    run = ludic.RunConfig(model="x", env=(questions.env,), env_options={questions.env: own})
    return make_environment(questions.env, located(run, inputs.storage).env_options[questions.env])()


def test_functions_and_scorers_are_parts_of_one_sum(tmp_path: Path) -> None:
    inputs = Inputs.of(str(tmp_path))
    questions = write_questions(inputs, [{"question": "say red", "answer": "red"}], {})
    options = write_rewards(inputs, named_rewards({"exact": 0.5, "short": short, "regex": 0}), questions)
    environment = environment_of(inputs, questions, options)
    environment.reset(environment.example(0, "train"))
    transition = environment.step("red")
    assert transition.reward == 0.5 * 1 + 1 * 7
    components = {"exact": 1, "exact.correct": 1, "short": 7, "regex": 1, "regex.correct": 1}
    assert transition.reward_components == components
    assert transition.correct is True
    assert write_rewards(inputs, named_rewards(["exact"]), questions) == {"scorer": {"exact": 1.0}}
    options = write_rewards(inputs, named_rewards({"regex": short, "math": 0}), questions)
    options["scorer"] |= {"regex": 1}
    with pytest.raises(ConfigError, match="two scorers are called regex; each is a component of the reward"):
        environment_of(inputs, questions, options)


@pytest.mark.parametrize("name", ["reward.py", "words.py", "settings.json", "questions-1.jsonl"])
def test_no_file_of_the_inputs_is_written_or_deleted_through_a_link(tmp_path: Path, name: str) -> None:
    mine, link = tmp_path / "mine", tmp_path / "run/inputs" / name
    mine.write_text("my own")
    inputs = Inputs.of(str(tmp_path / "run"))
    link.parent.mkdir(parents=True)
    link.symlink_to(mine)
    with pytest.raises(SchemaError, match=rf"inputs/{name} is a symbolic link that leads out of its run"):
        inputs.put(name, b"x")
    inputs.delete_code()
    assert link.is_symlink() is not name.endswith(".py")
    assert mine.read_text() == "my own"


def test_a_link_with_the_name_of_an_unfinished_file_is_no_way_out(tmp_path: Path) -> None:
    mine, folder = tmp_path / "mine", tmp_path / "run/inputs"
    mine.write_text("my own")
    folder.mkdir(parents=True)
    for name in (".reward.py.partial", "reward.py.partial", ".tmp"):
        (folder / name).symlink_to(mine)
    assert Inputs.of(str(tmp_path / "run")).put("reward.py", b"x") == folder / "reward.py"
    assert not (folder / "reward.py").is_symlink()
    assert mine.read_text() == "my own"


def accuracy(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def easy(completion: str, level: int, unit: float = 0.5) -> float:
    return level * unit


def test_a_function_with_trls_signature_and_a_scorer_under_another_name_are_parts(tmp_path: Path) -> None:
    inputs = Inputs.of(str(tmp_path))
    questions = write_questions(inputs, [{"question": "say red", "answer": "red"}], {})
    rewards = named_rewards({"right": (accuracy, 2.0), "same": ("exact", 0.5)})
    environment = environment_of(inputs, questions, write_rewards(inputs, rewards, questions))
    environment.reset(environment.example(0, "train"))
    transition = environment.step("red")
    assert transition.reward == 2.0 + 0.5
    assert transition.reward_components == {"right": 1.0, "same": 1.0, "same.correct": 1.0}
    # All rewards of TRL get one answer at a time, in lists of one.
    assert not hasattr(environment, "score_group")


def test_the_columns_of_a_reward_are_no_option_so_a_changed_reward_may_take_others(tmp_path: Path) -> None:
    inputs = Inputs.of(str(tmp_path))
    questions = write_questions(inputs, [{"question": "say red", "answer": "red", "level": 3}], {})

    first = write_rewards(inputs, named_rewards({"r": reward}), questions)
    assert write_rewards(inputs, named_rewards({"r": easy}), questions) == first
    environment = environment_of(inputs, questions, first)
    environment.reset(environment.example(0, "train"))
    assert environment.step("red").reward == 1.5


def test_a_run_keeps_which_scorers_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    env = "qa/questions.jsonl"
    scorers = {"scorer": "reward.py:ludic_score", "columns": ["answer"]}
    root = put_run("runs/mine", ludic.RunConfig(model="x", env=(env,), env_options={env: scorers}))

    def kept(**options: Any) -> dict[str, Any]:
        own = {"env_options": {env: {"scorer": "reward.py:ludic_score", **options}}}
        _keep_columns(root, own)
        return own["env_options"][env]

    assert kept() == scorers
    with pytest.raises(
        ConfigError, match=r"runs/mine began with the scorers reward.py:ludic_score, and reward now names"
    ):
        kept(scorer={"math": 1.0})
    with pytest.raises(
        ConfigError, match=r"a function of reward sees all answers to a question \(completions\), and when"
    ):
        kept(group_scorer="reward.py:ludic_score_group")


FAILING = f"""
import ludic


def helper(text):
    return {{}}[text]


def right(completion):
    return helper(completion)


ludic.grpo(model="{MODEL}", dataset="questions.jsonl", reward=right, root="runs/mine", device="cpu")
"""


def test_an_error_names_the_script_and_its_line_without_frames_of_ludic(folder: Path) -> None:
    (folder / "train.py").write_text(FAILING)
    done = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(r"KeyError: '\w+' \(train.py, line 6\) \(tried with the answer '\w+'\)", done.stderr), done.stderr
    assert "inputs/reward.py" not in done.stderr
    assert done.stderr.count("  File ") <= 4
    assert not (folder / "runs" / "mine").exists()


def test_a_function_of_the_group_is_tried_before_a_start(folder: Path) -> None:
    text = "def right(completions, answer):\n    return [1.0]\n"
    (folder / "train.py").write_text(FAILING.replace("def right(completion):\n    return helper(completion)\n", text))
    done = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert (
        "reward right returned [1.0], wanted a list of 3 numbers, one an answer (train.py:9, in right)" in done.stderr
    )
    assert not (folder / "runs" / "mine").exists()


@pytest.mark.slow
def test_without_a_terminal_each_step_and_the_end_are_lines(folder: Path) -> None:
    _, logged = forked_script(
        folder,
        "import ludic\ndef reward(completion, answer):\n    return 1.0 if len(completion) % 2 else float('nan')\n"
        f'ludic.grpo(model="{MODEL}", dataset="questions.jsonl", reward=reward, root="runs/mine", {SETTINGS})\n',
    )
    for said in (
        "ludic.run: step 1 of 2  reward ",
        "ludic.run: step 2 of 2  reward ",
        "failed: ScorerError: reward reward returned nan, wanted a finite number (train.py:2, in reward)",
        "held out: mean reward ",
        "no 95% interval: too few examples (",
    ):
        assert said in logged
    rows = (
        ludic.open(folder / "runs" / "mine").sql("select distinct error from rollouts where error is not null").rows()
    )
    assert rows == [("ScorerError: reward reward returned nan, wanted a finite number (train.py:2, in reward)",)]


GOOD = {"model": MODEL, "dataset": "questions.jsonl", "reward": "exact", "root": "runs/mine"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"learning_rat": 1e-6}, r"setting 'learning_rat' is unknown; did you mean 'learning_rate'\?"),
        ({"rewrad": 1}, r"setting 'rewrad' is unknown; did you mean 'reward'\?"),
        ({"reward_funcs": [len]}, r"'reward_funcs' is TRL's; in ludic it is reward: functions with TRL's signature"),
        (
            {"reward_weights": [1]},
            r"'reward_weights' is TRL's; in ludic it is reward: a dict of functions with weights",
        ),
        ({"num_steps": 0}, r"num_steps is 0, wanted at least 1"),
        ({"agent": len}, r"agent is a function \(len\), wanted a text; .* agent=\"path/to/file.py:len\""),
        ({"algorithm": "grop"}, r"algorithm 'grop' is unknown; did you mean 'grpo'"),
        ({"dataset": None}, r"dataset is None; give one and a reward, or an environment"),
        ({"reward": None}, r"reward is None; give a function"),
        ({"env": "moar_cats"}, r"dataset and env \(moar_cats\) are both given; choose one"),
        ({"env": "moar_cats", "dataset": None}, r"reward, heldout, .* are for a dataset, which is None"),
        ({"reward": 3}, r"reward is 3, wanted a function, a list"),
        ({"reward": "exat"}, r"scorer 'exat' is unknown; did you mean 'exact'"),
        ({"dataset": "absent.jsonl"}, r"absent.jsonl can't be read"),
        ({"dataset": [{"prompt": "q"}]}, r"the scorer exact needs a right answer; name its column"),
        ({"dataset_options": {"splt": 1}}, r"got an unexpected keyword argument 'splt'"),
        ({"heldout": 1.5}, r"heldout_share is 1.5, wanted a number from 0 to 1"),
        ({"model": "absent/model"}, r"absent/model: there is no such folder"),
        ({"offline": True}, r"`ludic run` trains on rollouts that its workers sample"),
        ({"algorithm": "sft"}, r"reward does not apply to sft"),
        (
            {"algorithm": "sft", "reward": None, "num_workers": 2, "local_workers": 2},
            r"local_workers does not apply to s",
        ),
        (
            {"algorithm": "dpo", "reward": None},
            r"questions.jsonl, row 0 fits no form",
        ),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(folder)
    before = {path.name for path in folder.iterdir()}
    with pytest.raises(LudicError, match=said) as caught:
        ludic.fit(**{"algorithm": "grpo", **GOOD, **changed})
    assert "\n" not in str(caught.value)
    assert {path.name for path in folder.iterdir()} - before <= {"runs"}
    assert not (folder / "runs" / "mine").exists()


def test_a_data_set_without_held_out_questions_is_not_evaluated(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    env, options = f"qa/{folder}/questions.jsonl", {"scorer": "exact", "heldout_share": 0}
    run = ludic.RunConfig(model="x", env=(env,), env_options={env: options})
    inputs = Inputs.of(str(folder / "run"))
    assert not _has_heldout(run, inputs)
    assert "questions, none of them held out" in caplog.text
    assert "heldout=0.5 holds out half of the questions" in caplog.text
    assert _has_heldout(ludic.RunConfig(model="x", env=("addition",)), inputs)


def test_the_server_that_forks_processes_imports_while_the_inputs_are_made_and_is_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []
    start, write = StartServer.__init__, fit_inputs.write_questions

    def noted_start(*args: Any) -> None:
        done.append("server")
        start(*args)

    def noted_write(*args: Any, **options: Any) -> Any:
        done.append("questions")
        return write(*args, **options)

    monkeypatch.setattr(StartServer, "__init__", noted_start)
    monkeypatch.setattr(fit_inputs, "write_questions", noted_write)
    rows = [{"prompt": f"{number} + 1", "answer": f"{number + 1}"} for number in range(8)]
    with pytest.raises(LudicError, match="nothing-here"):
        ludic.grpo(model=tmp_path / "nothing-here", dataset=rows, reward="exact", root=tmp_path / "run", num_steps=1)
    assert done == ["server", "questions"]


def test_a_call_that_starts_some_workers_need_not_name_all_workers_of_the_run() -> None:
    with _server_started_early({"launch": {"local_workers": 2}, "run": {}, "engine": {}}):
        pass  # num_workers is in run.json, which is read later
