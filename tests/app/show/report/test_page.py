"""What a report shows of a run, its evaluations and comparisons; figures worked by hand."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from app.show.report.conftest import HOSTILE, SPELT, StoreRollouts, says
from eval.conftest import StoreSamples
from strategies import make_group

import ludic
from ludic.app.show.report.page import evaluation_section, gather, render
from ludic.errors import ConfigError, QueryError
from ludic.eval.config import MeasureConfig
from ludic.records.rollout import RolloutBatch, RolloutMetadata
from ludic.root.root import Root
from ludic.root.rows.tables import MetricsLog
from ludic.root.rows.writer import RolloutWriter
from ludic.root.sql.connection import Connections
from ludic.run.run_json import put_run, run_of


def text_of(html: str) -> str:
    """The page's text, with one space for each run of tags and spaces."""
    body = html[html.index("<body>") :]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", body)).strip()


def shown(root: Root, **options: object) -> str:
    return text_of(ludic.Run(root).report(**options).html)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_run_that_has_only_begun_says_what_is_missing(root: Root) -> None:
    text = shown(root)
    for words in (
        "No rollouts yet.",
        "No gradient step yet.",
        "No group has a scored episode.",
        "No evaluation is stored",
    ):
        assert words in text


@pytest.fixture(scope="module")
def of_trained(trained: Root) -> str:
    """The text of the report of a run with one step."""
    return shown(trained)


@pytest.mark.slow
def test_steps_are_plotted_with_their_numbers(of_trained: str) -> None:
    text = of_trained
    # The step used groups of mean 1/2 and 1/3, and dropped the four rollouts of the group without variance.
    assert "reward 0.4167 0.4167 0.4167 0.4167 0.4167" in text
    assert re.search("Reward mean of [^ ]+ [^ ]+ considered rollouts, dropped ones too", text)
    assert re.search("Response length tokens, mean of [^ ]+ [^ ]+ used rollouts", text)
    assert "used 8 8 8 8 8 dropped by drop_zero_variance_groups 4 4 4 4 4" in text
    assert "drop_zero_variance_groups 4 33.3%" in text
    assert "Not measured: KL to the reference model" in text
    for title in ("Response length", "Entropy", "Mismatch of sampler and trainer", "Lag", "Throughput"):
        assert title in text


@pytest.mark.slow
def test_steps_that_a_later_attempt_replaced_are_left_out(breakable: Path) -> None:
    root = Root.open(str(breakable))
    log = MetricsLog(root, "train", "superseded")
    log.write(attempt_id=0, step=1, reward_mean=777.0, policy_version=0)
    log.close()
    assert "777" not in shown(root)


@pytest.mark.slow
def test_the_best_and_the_worst_groups_come_with_their_conversations(root: Root, store_rollouts: StoreRollouts) -> None:
    for number in range(7):
        answer = says(f"question {number}", f"answer {number}")
        store_rollouts([[number + 0.0, number + 1.0]], seed=number, messages=answer)
    text = shown(root)
    best, worst = text[text.index("Best groups") :].split("Worst groups")
    assert re.findall(r"mean reward ([\d.]+)", best) == ["6.5", "5.5", "4.5"]
    assert re.findall(r"mean reward ([\d.]+)", worst) == ["0.5", "1.5", "2.5"]
    assert "best rollout, reward 7 user question 6 assistant answer 6 worst rollout, reward 6" in best
    assert "question 3" not in text


@pytest.mark.slow
def test_groups_are_listed_by_environment_with_the_wanted_answer(root: Root, store_rollouts: StoreRollouts) -> None:
    for number, env in enumerate(["dead", "alive"]):
        for seed in range(4):
            options = {"messages": says("question", f"answer of {env}"), "env_name": env, "wanted": f"right of {env}"}
            reward = number * (1.0 + seed)
            store_rollouts([[reward]], seed=10 * number + seed, correct=bool(number), **options)
    text = shown(root)
    sections = re.split(r"((?:Best|Worst) groups of \w+)", text)
    titles, parts = sections[1::2], sections[2::2]
    assert {title: re.findall(r"mean reward ([\d.]+)", part) for title, part in zip(titles, parts, strict=True)} == {
        "Best groups of alive": ["4", "3", "2"],
        "Worst groups of alive": ["1"],
        "Best groups of dead": ["0", "0", "0"],
    }
    alive = sections[sections.index("Best groups of alive") + 1]
    assert "wanted answer right of alive one of equal rewards, reward 4, correct user question" in alive
    assert "wanted answer right of dead one of equal rewards, reward 0, wrong user question" in text


@pytest.mark.slow
def test_rewards_by_a_column_of_the_data_set_have_a_table_of_the_most_frequent_values(
    root: Root, store_rollouts: StoreRollouts
) -> None:
    name = "<b>level\n--"
    for number in range(14):  # 0 to 13, of which the first six are hard
        value = "hard <i>" if number < 6 else number
        columns = None if number == 13 else json.dumps({name: value})
        store_rollouts([[float(number), float(number)]], seed=number, example_columns=columns)
    text = shown(root, by=name)
    # 0 to 5, each a group: 2.5, and sqrt(3.5 / 6) * 2.571 on either side
    assert "rollouts groups mean reward 95% interval hard &lt;i&gt; 12 6 2.5 0.537 to 4.46" in text
    assert "10 2 1 10 too few examples (1)" in text
    assert "- 2 1 13 too few examples (1)" in text
    with pytest.raises(QueryError, match=r"column 'level' is unknown; did you mean '<b>level\\n--'\?"):
        ludic.Run(root).report(by="level")
    store_rollouts([[0.0]] * 7, seed=20, example_columns=None)
    for number in range(14, 20):
        store_rollouts([[0.0]], seed=number, example_columns=json.dumps({name: number}))
    assert "the 12 most frequent values, without 3 others, with 3 rollouts" in shown(root, by=name)


@pytest.mark.slow
def test_many_environments_have_one_best_and_one_worst_group_each(root: Root, store_rollouts: StoreRollouts) -> None:
    for number in range(5):
        for seed in range(3):
            store_rollouts([[float(seed)]], seed=10 * number + seed, env_name=f"env{number}")
    text = shown(root)
    assert re.findall(r"mean reward ([\d.]+) , (env\d)", text) == [
        (reward, f"env{number}") for number in range(5) for reward in ("2", "0")
    ]


@pytest.mark.slow
def test_correct_answers_are_plotted_by_version_and_environment(of_trained: str, breakable: Path) -> None:
    assert "Correct answers" not in of_trained
    root = Root.open(str(breakable), writable=True)
    groups = [make_group(rewards=[1.0, 0.0, 0.0, None], env_name=f"env{number}", seed=number) for number in (7, 8)]
    marks = (True, False, None, None)
    groups = [
        replace(group, rollouts=tuple(map(lambda row, mark: replace(row, correct=mark), group.rollouts, marks)))
        for group in groups
    ]
    with RolloutWriter(root, "w7-correct") as writer:
        writer.append(RolloutBatch(groups=tuple(groups), metadata=RolloutMetadata(worker_id="w7-correct")))
    text = shown(root)
    # of the answers that are known, one of two is right
    assert re.search("Correct answers share of a version[^ ]+ rollouts", text)
    assert "env7 0.5 0.5 0.5 0.5 0.5 env8 0.5 0.5 0.5 0.5 0.5" in text
    assert re.search(r"env7 4 0.3333 50.0% ", text)  # the table of environments


@pytest.mark.slow
def test_the_head_of_a_report_says_how_the_run_was_trained(of_trained: str) -> None:
    text = of_trained
    head = text[: text.index("Training", text.index("steps"))]
    # Groups of mean 1/2 and 1/3, and one of equal rewards that was dropped before: the only step has their mean.
    assert re.search(
        r"run finished, step 1 of 1 \S+, rloo on \S+ · reward 0.417 → 0.417 \(first and last step\) · "
        "no evaluations to compare · 2 warnings Settings run ",
        head,
    )
    for fact in ("advantage rloo", "objective reinforce", "algorithm rloo", "LoRA off", "steps 1 of 1"):
        assert fact in head
    assert re.search(
        r"filters drop_zero_variance_groups learning rate \S+, constant computes in float32; .* LoRA", head
    )


@pytest.mark.slow
def test_few_groups_are_shown_once(root: Root, store_rollouts: StoreRollouts) -> None:
    store_rollouts([[1.0, 1.0], [0.0, 0.0]])
    text = shown(root)
    assert re.findall(r"mean reward ([\d.]+)", text) == ["1", "0"]
    assert "Worst groups" not in text
    assert "one of equal rewards, reward 1" in text


@pytest.mark.slow
def test_failed_rollouts_are_counted_by_their_error(root: Root, store_rollouts: StoreRollouts) -> None:
    store_rollouts([[None, None, 1.0]], error="the server is gone")
    store_rollouts([[None]], seed=1, error="another one")
    text = shown(root)
    assert "3 moar_cats 0 the server is gone 1 moar_cats 0 another one" in text


@pytest.mark.slow
def test_long_texts_and_conversations_lose_their_middle(root: Root, store_rollouts: StoreRollouts) -> None:
    store_rollouts([[1.0]], messages=says("a" * 5000, *map(str, range(100))))
    text = shown(root)
    assert "1,000 characters left out" in text
    assert "61 messages left out" in text
    assert len(text) < 8000


@pytest.mark.slow
def test_evaluations_come_with_intervals_and_gains(root: Root, store_samples: StoreSamples) -> None:
    store_samples({f"e{number}": [0.0] for number in range(8)}, messages=says("what", "wrong"))
    store_samples({f"e{number}": [1.0] for number in range(8)}, version=3, messages=says("what", "right"))
    text = shown(root)
    # Clopper-Pearson of 0 of 8 and of 8 of 8: 0.025 ** (1 / 8) = 0.6306
    assert "0 addition mean_reward 0 0 to 0.369" in text
    assert re.search(r"3 addition mean_reward 1 0\.63\d* to 1", text)
    assert "· evaluation @3 against @0: better ·" in text
    # Eight of eight up: McNemar 2 / 2**8
    assert re.search(r"@3 addition mean_reward 0 1 1 0\.\d+ to 1 0\.0078 0\.0078", text)
    assert "8 pairs, 8 up and 0 down, McNemar&#39;s exact test" in text
    assert "+1 e0 user what baseline: 0 assistant wrong @3: 1 assistant right" in text


@pytest.mark.slow
def test_versions_choose_evaluations(root: Root, store_samples: StoreSamples) -> None:
    for version in (0, 2, 5, 9):
        store_samples({"a": [0.0], "b": [1.0]}, version=version)

    def versions(chosen: str | None) -> list[int]:
        with Connections() as connections:
            section = evaluation_section(connections, root, chosen, MeasureConfig(measures=("mean_reward",)))
        assert section is not None
        return section["versions"]

    assert versions(None) == [0, 2, 5, 9]
    assert versions("0,latest") == [0, 9]
    assert versions("1-5") == [2, 5]
    assert versions("5-latest") == [5, 9]
    with pytest.raises(ConfigError, match=r"has no evaluation of version 4; it has version 0 of addition"):
        versions("0,4")


def test_versions_of_a_run_without_evaluations_are_refused(root: Root) -> None:
    with pytest.raises(ConfigError, match="has no evaluation; `ludic eval"):
        ludic.Run(root).report(versions="latest")


@pytest.mark.slow
def test_a_comparison_shows_gains_and_losses_with_both_answers(
    root: Root, store_samples: StoreSamples, tmp_path: Path
) -> None:
    other = put_run(str(tmp_path / "other"), run_of(root))
    store_samples({"a": [0.0, 0.0], "b": [1.0, 1.0]}, messages=says("sum?", "here"))
    store_samples({"a": [1.0, 0.0], "b": [0.0, 0.0]}, to=other, messages=says("sum!", "there"))
    text = shown(root, compare=("0", f"{other.url}@latest"))
    gained, lost = text[text.index("Examples that gained most") :].split("Examples that lost most")
    # The prompts differ, so both are shown.
    pair = "user sum? assistant here {other}: {b} mean of 2; this sample {sample} user sum! assistant there"
    assert "+0.5 a baseline: 0 mean of 2; this sample 0 user sum? assistant here" in gained
    assert pair.format(other=f"{other.url}@0", b="0", sample="0") in lost
    assert "the prompts of 2 of 2 examples differ" in text


@pytest.mark.slow
def test_versions_without_a_common_example_are_not_compared(root: Root, store_samples: StoreSamples) -> None:
    store_samples({"a": [0.0]})
    store_samples({"b": [0.0]}, version=1)
    assert "have no example in common" in shown(root)


@pytest.mark.slow
def test_hostile_text_is_escaped_everywhere(hostile: Root) -> None:
    report = ludic.Run(hostile).report()
    html = report.html
    assert html.count("&lt;script&gt;") >= 12  # names of environments and examples, errors, messages
    for tag in ("script", "img", "svg onload", "a href=&", "iframe"):
        assert f"<{tag}" not in html.replace("<a href=&#", "")
    assert not set("\x00\x1b\u202e") & set(html)
    assert "{{ 7 * 7 }}" in html
    assert html.count("</style>") == 1
    check_frame_without_rights(report._repr_html_())


def check_frame_without_rights(frame: str) -> None:
    """What a notebook gets."""
    assert frame.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
    assert frame.count("<") == 2
    assert " sandbox " in frame


def test_half_characters_and_hostile_warnings_can_be_written(root: Root) -> None:
    values = gather(root, None, (), MeasureConfig()) | {"diagnostics": [f"\ud800 {HOSTILE}"]}
    html = render(values)
    assert r"\ud800" in html
    html.encode()
    assert "<img" not in html
    assert SPELT.startswith("<script>")


@pytest.mark.slow
def test_warnings_are_those_of_the_panel(root: Root) -> None:
    log = MetricsLog(root, "worker", "w0")
    log.write(
        env_name="addition", num_rollouts=64, num_groups=8, num_errors=64, first_error="no such file", policy_version=0
    )
    log.close()
    assert "every one of 64 rollouts failed in addition; the first error: no such file" in shown(root)
