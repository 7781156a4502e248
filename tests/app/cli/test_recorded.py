"""Every command on a root that `ludic.record` made of another trainer's run (docs/record.md)."""

import json
import re
import shlex
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import GROUP_SIZE, GROUPS, KILLED_AFTER, NUM_STEPS, RESUMED_AT, SAMPLES, TRAINER, record_run

import ludic as package
from ludic.root.catalogue import WORKERS
from ludic.root.json_records import encode_record
from ludic.root.root import Root
from ludic.run.recording.losses import Lost

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[3] / "docs/record.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line)[1:] for line in re.findall(r"ludic (?:sql|bisect|what-if|report) runs/mine [^`\n]*", PAGE)
]
GUIDE = (Path(__file__).parents[3] / "docs/record.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two lives; not to be changed."""
    folder = tmp_path_factory.mktemp("recorded")
    return record_run(str(folder / "run"), folder / "model")


@pytest.fixture
def copied(recorded: str, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def test_the_run_is_sound_and_its_figures_name_the_recorded_trainer(ludic, recorded: str) -> None:
    assert ludic("verify", recorded).out == f"{recorded} is sound\n"
    stats = " ".join(ludic("watch", recorded, "--totals").out.split())
    again = KILLED_AFTER - RESUMED_AT + 1
    for text in (
        f"trainer {TRAINER}",
        f"steps {NUM_STEPS} planned, {NUM_STEPS * SAMPLES} rollouts used, mean off-policy steps 0",
        f"superseded {again} steps with {again * SAMPLES} rollouts",
        "policy no weights are stored",
        f"batch {GROUPS} groups, {SAMPLES} rollouts a step sampling max_tokens 8 ",
    ):
        assert text in stats
    assert "seed" not in stats


def test_watch_shows_what_the_trainer_said_and_nothing_that_only_ludic_s_has(ludic, recorded: str) -> None:
    panel = ludic("watch", recorded, "--once").out
    assert f"{TRAINER}, recorded as attempt 2" in panel
    assert "kl 0.08" in panel
    assert f"{GROUPS} groups with {SAMPLES} rollouts in its newest step" in " ".join(
        re.sub("[│ ]+", " ", panel).split()
    )
    assert "learning rate 1e-06" in panel
    for nonsense in ("none published", "none yet", "tokens/s", "s a step", "waiting", "ludic train"):
        assert nonsense not in panel


def test_the_report_has_the_trainer_s_settings_and_numbers(ludic, recorded: str, tmp_path: Path) -> None:
    assert ludic("report", recorded, "--output", tmp_path / "report.html").code == 0
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = " ".join(re.sub(r"<[^>]+>", " ", html).split())
    shown = "learning_rate 1e-06, beta 0, num_generations 4 (1 that are null"
    assert f"trainer {TRAINER} its settings learning_rate 1e-06," in page
    assert re.search(rf'<th>its settings</th><td class="text">{re.escape(shown)}[^<]+</td>', html)
    again = KILLED_AFTER - RESUMED_AT + 1
    assert f"0 dropped. Besides, superseded: {again} steps with {again * SAMPLES} rollouts, trained again" in page
    assert re.search(rf"<b>Loss</b>.*?numbers: {NUM_STEPS} points", html, re.DOTALL)
    assert re.search(r"kl ▁\S+ 0\.01 0\.08 0\.01 0\.08", page)
    assert "Components of the reward in recorded" in page
    missing = page.partition("Not measured: ")[2]
    assert "Throughput" in missing.partition(".")[0]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_commands_of_the_page_run(
    ludic, recorded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/mine").symlink_to(recorded)
    result = ludic(*command)
    assert (result.code, result.err) == (0, "")


def test_the_viewer_opens_it(ludic, recorded: str, tmp_path: Path) -> None:
    assert ludic("view", recorded, "--picture", tmp_path / "view.svg").code == 0
    assert f"trained&#160;by&#160;{TRAINER.replace(' ', '&#160;')}" in (tmp_path / "view.svg").read_text()


def test_the_best_and_the_worst_group_of_a_step_are_found_as_the_guide_says(ludic, recorded: str) -> None:
    (query,) = re.findall(r'^    ludic sql runs/mine "(.*where step = 20.*)"$', GUIDE, re.MULTILINE)
    found = package.open(recorded).sql(query.replace("step = 20", f"step = {NUM_STEPS}"))
    assert found["reward"].to_list() == sorted(found["reward"])
    shown = ludic("view", recorded, found["group_id"][0]).out
    assert f"what is {NUM_STEPS} plus" in shown
    assert f"step {NUM_STEPS}" in shown


def test_a_group_that_was_sampled_again_is_shown_as_superseded_and_whole_if_asked_for(ludic, recorded: str) -> None:
    sql = "select min(group_id) as id from all_batches where superseded and step = {}"
    quoted = ludic("sql", recorded, sql.format(KILLED_AFTER), "--format", "csv").out.splitlines()[-1]
    assert quoted.startswith('"')
    shown = ludic("view", recorded, quoted).out
    assert shown.count(f"superseded, step {KILLED_AFTER}") == GROUP_SIZE
    assert "a red ball" not in shown  # neither the best nor the worst
    assert "a red ball" in ludic("view", recorded, quoted, "--full").out
    (used,) = package.open(recorded).sql("select min(group_id) as id from batches where step = 8")["id"]
    assert "superseded" not in ludic("view", recorded, used).out


def test_an_empty_answer_is_said_to_be_empty(ludic, copied: Path) -> None:
    def row(answer: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": "why"}, {"role": "assistant", "content": answer}]
        return {"prompt_tokens": [5], "response_tokens": [1], "messages": messages, "episode_reward": len(answer)}

    with package.record(copied, trainer=TRAINER) as recorder:
        recorder.append([[row(""), row("so")]])
    sql = "select group_id, rollout_id from rollouts where group_size = 2 order by episode_reward"
    (group_id, empty), (_, other) = package.open(str(copied)).sql(sql).rows()
    shown = [ludic("view", copied, each).out for each in (group_id, empty, other)]
    assert ["(empty)" in each for each in shown] == [True, True, False]


def test_a_rollout_is_shown_as_text_with_what_was_kept_of_it(ludic, recorded: str) -> None:
    run = package.open(recorded)
    by_version = run.sql("select policy_version, min(rollout_id) as id from rollouts group by all order by all")["id"]
    of_trainer, of_ids = ludic("view", recorded, by_version[0]), ludic("view", recorded, by_version[2], "--tokens")
    assert "cats play <eos>" in of_trainer.out
    assert re.search("sampling +max_tokens 8 *\n", of_trainer.out)
    assert "logprobs of a trainer's forward pass" in " ".join(of_trainer.out.split())
    assert "logprobs the sampler's were not stored" in " ".join(of_ids.out.split())
    assert re.search(r"'cats'\s+-\s+-\s+0\s+yes", of_ids.out)


def test_rows_without_messages_are_shown_by_their_tokens(ludic, copied: Path) -> None:
    run = package.open(str(copied))
    (row,) = run.sql("from rollouts order by rollout_id limit 1").to_dicts()
    with package.record(copied, trainer=TRAINER) as recorder:
        tokens = {name: row[name] for name in ("prompt_tokens", "response_tokens")}
        recorder.append([[{**tokens, "episode_reward": reward} for reward in (0.0, 1.0)]])
    (group_id,) = run.sql("select group_id from groups where group_size = 2")["group_id"]
    shown = ludic("view", copied, group_id).out
    assert "prompt  <|user|> what is 1 plus 0 <eos> <|assistant|>" in shown
    assert shown.count("cats play <eos>") == 2


def test_what_if_compares_with_the_advantages_that_the_trainer_used(ludic, recorded: str) -> None:
    found = json.loads(ludic("what-if", recorded, "--advantage", "rloo", "--json").out)
    assert found["other_trainers"] == [TRAINER]
    assert [step["correlation"] for step in found["steps"]] == [pytest.approx(1.0)] * NUM_STEPS
    # The trainer used reward - mean; RLOO is that times n / (n - 1), with n = 4.
    assert all(
        row["new_advantage"] == pytest.approx(row["advantage"] * 4 / 3, abs=1e-6)
        for row in found["largest_differences"]
    )
    shown = ludic("what-if", recorded, "--advantage", "rloo").out
    assert "…" not in shown  # no header is cut
    assert all(row["rollout_id"][-12:] in shown for row in found["largest_differences"])
    kept = json.loads(ludic("what-if", recorded, "--filters", "drop_zero_variance_groups", "--json").out)
    assert {step["mean_abs_difference"] for step in kept["steps"]} == {0.0}
    refused = ludic("what-if", recorded)
    assert refused.code == 1
    assert f"{TRAINER} trained these steps by its own rules; name others: --advantage" in refused.err


def test_evaluations_of_the_trainer_are_compared(ludic, copied: Path) -> None:
    row = {"prompt_tokens": [1], "response_tokens": [1, 2], "purpose": "eval"}
    with package.record(copied, model=package.open(str(copied)).config.model, trainer=TRAINER) as recorder:
        for version, reward in ((0, 0.25), (NUM_STEPS, 0.75)):
            answers = [
                {**row, "env_example_id": f"example-{number}", "policy_version": version, "episode_reward": reward}
                for number in range(8)
            ]
            recorder.append([[answer] for answer in answers])
    found = json.loads(ludic("compare", f"{copied}@0", f"{copied}@{NUM_STEPS}", "--json").out)
    compared = found["differences"]
    assert [(each["estimate_a"], each["estimate_b"], each["difference"]) for each in compared] == [(0.25, 0.75, 0.5)]


def test_bisect_reads_the_trainer_s_own_numbers(ludic, recorded: str) -> None:
    out = ludic("bisect", recorded, "other['kl'] > 0.055").out
    assert out.startswith("(other['kl'] > 0.055) turns true at step 6; it is not at step 5.")


def test_bisect_claims_nothing_of_steps_that_it_did_not_look_at(ludic, recorded: str) -> None:
    out = ludic("bisect", recorded, "step in (2, 5, 6, 7, 8)").out
    looked = [4, 6, 5]  # of 8, which is true: the middle of 1 to 8, of 5 to 8, and of 5 to 6
    assert out.startswith("(step in (2, 5, 6, 7, 8)) turns true at step 5; it is not at step 4. The search assumes ")
    assert f"checked {len([step for step in looked if step < 5])} of the earlier steps" in out


@pytest.mark.parametrize(
    ("command", "refusal"),
    [
        (["train"], "train on its rollouts in a root of its own: `ludic train OTHER_ROOT --offline --sources"),
        (["train", "--offline"], "train on its rollouts in a root of its own"),
        (["run"], f"records the steps of {TRAINER}"),
        (["worker"], f"records the steps of {TRAINER}"),
        (["check"], f"records the steps of {TRAINER}"),
        (["cut", "--step", "5", "bug"], f"{TRAINER} trained attempt 1, and only ludic's own steps can be replayed"),
        (["sample", "--prompt", "why"], "records another program's run, so no weights are in it"),
        (["eval"], "stands for that of a recorded run, which is in the program that was recorded; name one with --env"),
        (["compare", "@1", "@2"], f"has no evaluation; record those of {TRAINER}, as rows of purpose eval"),
        (["export", "--format", "hf", "--out", "weights"], "has no weights of any version"),
    ],
    ids=" ".join,
)
def test_what_can_t_be_is_refused_in_a_line(
    ludic, recorded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], refusal: str
) -> None:
    monkeypatch.chdir(tmp_path)
    sides = [f"{recorded}{each}" for each in command if each.startswith("@")]
    named = [command[0], *sides] if sides else [command[0], recorded, *command[1:]]
    result = ludic(*named)
    assert result.code == 1
    assert refusal in result.err
    assert result.err.count("\n") == 1
    assert not [*tmp_path.iterdir()]


def test_a_folder_of_runs_names_them(ludic, copied: Path) -> None:
    (copied.parent / "other").mkdir()
    result = ludic("watch", copied.parent, "--totals")
    assert result.err == f"ludic: totals is of one run, and {copied.parent} has runs below it; name one of them\n"
    result = ludic("sql", copied.parent, "select 1")
    assert result.err == f"ludic: {copied.parent} holds no run: run.json is missing; {copied} is a run\n"


def test_other_roots_train_on_it_without_what_was_sampled_again(
    ludic, recorded: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained = tmp_path / "offline"
    result = ludic(
        *("train", trained, "--offline", "--sources", recorded, "--epochs", "1"),
        *("--objective", "sft", "--device", "cpu"),
    )
    assert result.code == 0, result.err
    again = (KILLED_AFTER - RESUMED_AT + 1) * SAMPLES
    assert f"left out {again} rollouts of superseded steps, which {TRAINER} repeated after a resume" in caplog.text
    considered = package.open(str(trained)).sql("select distinct rollout_id, root is not null as other from batches")
    once = package.open(recorded).sql("select distinct rollout_id from batches")
    assert set(considered["rollout_id"]) == set(once["rollout_id"])
    assert all(considered["other"])


def test_a_scorer_comes_later_and_rows_go_to_others(ludic, copied: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def has_cats(rollout):\n    return float('cats' in rollout.messages[-1].content)\n"
    )
    assert ludic("score", copied, "--scorer", f"{tmp_path}/own.py:has_cats").code == 0
    scores = package.open(str(copied)).sql("select count(*) as n, avg(value) as mean from scores")
    assert scores.rows() == [((NUM_STEPS + 2) * SAMPLES, 0.25)]
    assert ludic("export", copied, "--format", "jsonl", "--out", tmp_path / "rows.jsonl").code == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["capture"] for row in rows} == {"trainer", "ids"}


def test_compact_and_expire_know_that_nobody_reads_the_rows_again(ludic, copied: Path) -> None:
    assert "4 files of 2 partitions became 2\n" in ludic("compact", copied).out  # of the versions of both lives
    kept = ludic("expire", copied, "--keep-versions", "1")
    assert "a trainer that resumes" not in kept.out
    assert "steps were trained on them; --break-replay deletes them too" in kept.out
    assert ludic("expire", copied, "--keep-versions", "1", "--break-replay").code == 0
    assert ludic("verify", copied).code == 0


def test_rows_that_were_sampled_again_are_left_out_by_a_semi_join(recorded: str) -> None:
    run = package.open(recorded)
    counts = run.sql(
        "select count(*) as n from rollouts union all "
        "select count(*) from rollouts semi join batches using (rollout_id) order by n"
    )
    assert counts["n"].to_list() == [NUM_STEPS * SAMPLES, (NUM_STEPS + KILLED_AFTER - RESUMED_AT + 1) * SAMPLES]
    once = run.sql("select step, loss from metrics semi join batches using (attempt_id, step) order by step")
    assert once["step"].to_list() == [*range(1, NUM_STEPS + 1)]


def test_what_a_recorder_lost_is_in_stats_and_the_report(ludic, copied: Path, tmp_path: Path) -> None:
    root = Root.open(str(copied), writable=True)
    claim = WORKERS.read(root, 0, 1)
    lost = Lost(num_rollouts=12, num_groups=3, steps=((7, 8), (57, 201)), reasons={"No space left on device": 4})
    (copied / WORKERS.name_of(claim)).write_bytes(encode_record(replace(claim, lost=asdict(lost))))
    text = "lost: 12 rollouts in 3 groups, the ledger of steps 7, 57 to 200 (No space left on device)"
    assert f"{claim.worker_id}: {text}" in " ".join(ludic("watch", copied, "--totals").out.split())
    assert ludic("report", copied, "--output", tmp_path / "report.html").code == 0
    assert text in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "steps [7, 57 to 200], steps_without_metrics []" in " ".join(ludic("verify", copied).out.split())
