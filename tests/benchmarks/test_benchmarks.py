"""All benchmarks run at a tiny size, and what they compare does the same work; no figure is checked."""

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forks import Forked

from ludic.app.cli.settings import parse
from ludic.app.operations.start import run
from ludic.run.run_json import put_run

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no part of the package, and importable from the repository only."""
    monkeypatch.syspath_prepend(REPOSITORY)


def run_python(*args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *args],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_benchmarks_run_and_print_ratios():
    printed = run_python("-m", "benchmarks", "--quick")
    titles = (
        "Bytes a response token",
        "Million tokens a second",
        "Groups of 8 rollouts committed one by one",
        "Time of a poll that finds nothing",
        "Advantages of",
        "many_files:",
        "by its id",
        "Peak resident memory",
        "Planning a batch",
        "scale: time of the trainer's parts",
        "scale: requests to S3",
        "stream:",
        "package:",
        "packing:",
        "one_rank:",
        "train_step:",
        "Peak memory of reference logprobs",
        "A trainer whose rollouts",
        "train_wait:",
        "The whole ring",
        "continuous_batching:",
        "episodes:",
        "weights:",
        "viewer:",
        "peers:",
        "report:",
        "compare:",
    )
    indexes = [printed.index(title) for title in titles]
    assert indexes == sorted(indexes)
    assert "1.00x" in printed


@pytest.mark.slow
def test_an_engine_is_measured(capsys):
    from benchmarks import engines

    engines.main(quick=True, engines=("transformers",))
    assert "transformers" in capsys.readouterr().out


def test_the_settings_of_the_benchmark_of_learning_are_those_of_a_run():
    from benchmarks.learning import COMMON, FLAGS

    for name, flags in FLAGS.items():
        words = ["a-run", "--env", name, *shlex.split(f"{flags} {COMMON}")]
        assert parse(run, words, program="ludic run", description="")["env"] == (name,)


def test_the_settings_of_the_benchmark_of_agents_are_those_of_a_run():
    from benchmarks.agent_learning import AGENT, PLAIN, TASKS

    for own in (AGENT, PLAIN):
        for task, flags in TASKS.items():
            settings = parse(run, ["a-run", *shlex.split(f"{flags} {own[task]}")], program="ludic run", description="")
            assert ("agent" in settings) == (own is AGENT)


def test_every_format_gives_the_same_tokens_back():
    """Else the table would compare formats that do different work."""
    from benchmarks.rollouts import make_batch
    from benchmarks.store_size import COLUMNS, all_formats

    batch = make_batch(2, mean_length=20)
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    for name, form in all_formats(batch).items():
        arrays = dict(zip(COLUMNS, form.read(form.write()), strict=True))
        for column, found in arrays.items():
            for rollout, array in zip(rollouts, found, strict=True):
                np.testing.assert_array_equal(array, getattr(rollout, column), err_msg=f"{name}: {column}")


def test_each_encoding_of_experts_holds_them():
    from benchmarks.router_replay import MIXTURES, drawn_experts, encoded_bytes

    experts = drawn_experts(MIXTURES[0], 40)
    assert experts.shape == (40, 24, 4)
    assert (np.diff(experts, axis=2) > 0).all()
    found = encoded_bytes(MIXTURES[0], 20, 2)
    # 24 layers of 4 experts of 32: 5 bits each are 60 bytes; a bitmap of 32 bits a layer is 96.
    assert found["PLAIN, none"] > 4 * 96
    assert found["packed bits, zstd (another type)"] == pytest.approx(60, abs=2)
    assert found["as ludic writes it"] == pytest.approx(found["BYTE_STREAM_SPLIT, zstd"], rel=0.05)


def test_speeds_show_the_spread_of_the_rounds():
    from benchmarks.store_size import _speed

    # 6 million tokens in 2, 3 and 1 s; in the same rounds ludic took 1, 1 and 2 s
    seconds = {"ludic": [1.0, 1.0, 2.0], "other": [2.0, 3.0, 1.0]}
    assert _speed(seconds, "other", "ludic", 6_000_000) == ["3.0 (2.0 to 6.0)", "0.5x"]


def test_chunks_and_all_logits_give_the_same_logprobs():
    from benchmarks.logprobs_memory import _model, by_all_logits, even_batch
    from ludic.training.logprobs import token_logprobs

    model, batch = _model(100), even_batch(64, 100)
    found = token_logprobs(model, batch, chunk_tokens=10)[0]
    np.testing.assert_allclose(found.detach(), by_all_logits(model, batch).detach(), atol=1e-5)


def test_packed_and_padded_rows_give_the_same_logprobs():
    from benchmarks.models import make_model
    from benchmarks.packing import skewed_sequences
    from benchmarks.padding import padded_logprobs
    from benchmarks.train_step import SIZES, _plain_logprobs
    from ludic.training.batches.packing import pack
    from ludic.training.logprobs import token_logprobs

    model = make_model(num_attention_heads=2, num_key_value_heads=1, head_dim=32, **SIZES["tiny"])
    sequences = skewed_sequences(5, 20, 100)
    batch = pack(sequences)
    wanted = token_logprobs(model, batch)[0].detach()
    np.testing.assert_allclose(padded_logprobs(model, sequences, batch).detach(), wanted, atol=1e-5)
    in_bfloat16 = _plain_logprobs(model, sequences, batch).detach()
    np.testing.assert_allclose(in_bfloat16, wanted, atol=0.05)


def test_sql_and_plain_python_plan_the_same_batch():
    from benchmarks.planner import RULES, pending_rows, plan_in_python
    from ludic.root.sql.planner import Planner

    rows, planner = pending_rows(20), Planner(RULES)
    planner.add(rows)
    by_sql = planner.plan(step=1, attempt_id=1, trainer_version=8)
    by_python = plan_in_python(rows.to_pylist(), trainer_version=8)
    assert by_sql is not None
    assert by_sql["rollout_id"].to_pylist() == [row["rollout_id"] for row in by_python]
    assert by_sql["advantage"].to_pylist() == pytest.approx([row["advantage"] for row in by_python])


def test_every_rollout_of_a_simulated_run_is_stored_and_planned_once(tmp_path):
    """`simulate` itself asserts that no group is planned twice, and that each is delivered."""
    from benchmarks.scale import _config
    from benchmarks.simulation import FIRST_VERSION, simulate
    from ludic.base.distributed import init_distributed, shut_down
    from ludic.root.rows.files import list_files
    from ludic.root.rows.ledger import read_ledger
    from ludic.root.rows.parquet import read_columns

    init_distributed("cpu")
    root = put_run(str(tmp_path / "run"), _config(3))
    outcome = simulate(root, root, num_steps=2, train_s=3.2)
    shut_down()
    stored = [row for file in list_files(root) for row in read_columns(root, file.name, ["rollout_id"]).to_pylist()]
    assert len({row["rollout_id"] for row in stored}) == len(stored) == outcome.num_rollouts
    # A batch is a call of each of 3 workers: 3 x 8 groups of 8. The first step has it after a call, 6.4 s.
    ledgers = [read_ledger(root, 1, step) for step in (1, 2)]
    assert [ledger.num_rows for ledger in ledgers] == [192, 192]
    assert set(ledgers[0]["policy_version"].to_pylist()) == {FIRST_VERSION}
    assert outcome.clock_s > 2 * 6.4


def test_requests_to_the_s3_server_are_counted_by_client_kind_and_folder():
    from benchmarks.s3_server import Request, _described

    def described(method, path, query=""):
        return _described("trainer", {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query})

    assert described("PUT", "/bucket/run/metrics/a-0.parquet") == Request("trainer", "PUT", "metrics")
    assert described("GET", "/bucket/run/policies/LATEST") == Request("trainer", "GET", "policies/LATEST")
    assert described("GET", "/bucket/run/policies/version=1/a") == Request("trainer", "GET", "policies")
    listing = described("GET", "/bucket", "list-type=2&prefix=run%2Frollouts%2Fversion%3D7%2F")
    assert listing == Request("trainer", "LIST", "rollouts")
    assert described("POST", "/bucket", "delete=") == Request("trainer", "DELETE", "")


@pytest.mark.slow
def test_two_checkouts_are_measured_in_turns():
    args = ["--other", ".", "--quick", "--rounds", "2", "--only", "store_size", "planner"]
    printed = run_python("-m", "benchmarks.beside", *args)
    assert all(words in printed for words in ("store_size, write", "planner, 16 groups wait", "here of there"))
    (size,) = (line for line in printed.splitlines() if "store_size, bytes" in line)
    assert "1.00" in size or "0.99" in size  # ids are random, and so a few bytes


@pytest.mark.slow
def test_ludics_script_is_measured_where_trl_is_not_installed(tmp_path):
    process = Forked([REPOSITORY / "benchmarks" / "against_trl.py", "--quick"], tmp_path / "log", warnings="error")
    assert process.wait(timeout=850) == 0, process.printed()
    printed = process.printed()
    # The title is as wide as the table.
    assert re.search(r"reward on held-out prompts, 0\.\d{3} before training", " ".join(printed.split()))
    (row,) = (line for line in printed.splitlines() if line.strip("│ ").startswith("0 "))
    reward, seconds = (float(cell) for cell in row.strip("│ ").split("│")[1:])
    assert -0.2 <= reward <= 1  # on_topic is at most 1; 16 words cost a tenth of 1
    assert seconds > 0


def test_the_rewards_of_both_scripts_are_the_same():
    ours, theirs = (rewards_of(f"{name}_grpo.py") for name in ("ludic", "trl"))
    for text in ("cats", "", "the cats love cats", "dogs " * 16):
        completions = [[{"role": "assistant", "content": text}]]
        assert theirs["on_topic"](completions, answer=["cats"]) == [ours["on_topic"](text, answer="cats")]
        assert theirs["eight_words"](completions, answer=["cats"]) == [ours["eight_words"](text)]
    assert ours["on_topic"]("the cats love cats", answer="cats") == 0.5
    assert ours["eight_words"]("dogs " * 16) == -1.0


def rewards_of(script: str) -> dict[str, Callable[..., Any]]:
    """The functions of a script, without what it does when it runs."""
    tree = ast.parse((REPOSITORY / "benchmarks" / script).read_text())
    names: dict[str, Any] = {}
    exec(
        compile(ast.Module([each for each in tree.body if isinstance(each, ast.FunctionDef)], []), script, "exec"),
        names,
    )
    return names
