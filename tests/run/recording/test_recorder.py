"""What another trainer records is what a root holds: rows, ledgers with their addresses, numbers, lives."""

import json
import math
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from recorded import MODEL, claims_of, group, ledger_of, metrics_of, parents_of, problems_of, rows_of
from strategies import make_batch

import ludic
from ludic.errors import ConfigError, InvalidBatchError, ModelError, OwnedError, StoreError
from ludic.records.rollout import RolloutGroup
from ludic.root.attempts import start_attempt
from ludic.root.claims import describe_process, owner_name, read_lease
from ludic.root.json_records import encode_record
from ludic.root.weights.model_location import first_model
from ludic.run.config import RunConfig
from ludic.run.recording import life, recorder
from ludic.run.run_json import put_run


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "run")


def test_what_a_trainer_says_of_its_steps_is_what_the_root_holds(url: str):
    secrets = {
        "args": SimpleNamespace(hub_token="abc'def", api_key=b"uvw"),
        "password": Path("xyz"),
        "name": f"hf_{'q' * 34}",
    }
    settings = {"lr": 1e-5, "hub_token": "hf_secret", "path": Path("data"), "nan": math.nan, **secrets}
    with ludic.record(url, model=MODEL, trainer="mine 1.0", settings=settings, temperature=0.7) as recorder:
        first = recorder.append([group(0), group(1, length=9)])
        recorder.step(1, advantages=dict(zip(first[1:], np.arange(7.0), strict=True)), dropped={first[0]: "too easy"})
        recorder.metrics(1, {"loss": np.float32(0.5), "kl": 3, "reward_mean": 9.0, "grad_norm": math.inf, "none": None})
        columns = {"level": np.int64(3), "of": {"url": None}}
        second = recorder.append([group(2, policy_version=0, metadata={"source": "web"}, example_columns=columns)])
        per_token = np.linspace(-1, 1, 6)
        recorder.step(2, advantages={second[3]: per_token, first[1]: -2.0}, version=1)
        recorder.metrics(2, {"num_pending_groups": 4, "kl": math.nan})
    assert not recorder.lost
    assert problems_of(url) == []

    rows = {row["rollout_id"]: row for row in rows_of(url)}
    assert list(rows) == [*first, *second]
    given = group(1, length=9)[2]
    found = rows[first[6]]
    assert found["response_tokens"] == given["response_tokens"].tolist()
    assert np.allclose(found["response_logprobs"], given["response_logprobs"], atol=1e-7)
    assert found["token_rewards"] == [0] * 8 + [2.0]
    assert (found["temperature"], found["model"], found["capture"]) == (pytest.approx(0.7), MODEL, None)
    assert (found["group_index"], found["group_size"], found["policy_version"]) == (2, 4, 0)
    assert [rows[name]["policy_version"] for name in second] == [0] * 4
    assert rows[second[0]]["metadata"] == [("source", "web")]
    assert rows[second[0]]["example_columns"] == '{"level":3,"of":{"url":null}}'

    of_first, of_second = ledger_of(url).values()
    assert [(row["rollout_id"], row["advantage"]) for row in of_first[:7]] == list(
        zip(first[1:], range(7), strict=True)
    )
    assert (of_first[7]["rollout_id"], of_first[7]["reason"], of_first[7]["used"]) == (first[0], "too easy", False)
    assert [(row["rollout_id"], row["lag"], row["num_uses"]) for row in of_second] == [
        (second[3], 1, 1),
        (first[1], 1, 2),
    ]
    assert of_second[0]["token_advantages"] == per_token.astype(np.float32).tolist()

    one, two = metrics_of(url)
    assert (one["loss"], one["grad_norm"], one["other"]) == (0.5, None, {"kl": 3.0, "reward_mean": 9.0})
    assert (one["num_rollouts"], one["num_groups"], one["reward_mean"], one["advantage_mean"]) == (7, 2, 1.5, 3.0)
    assert (one["num_tokens"], one["drops"], one["off_policy_steps_max"]) == (7 * 5 + 3 * 6 + 4 * 9, {"too easy": 1}, 0)
    assert (two["num_pending_groups"], two["other"], two["off_policy_steps_mean"], two["policy_version"]) == (
        4,
        None,
        1.0,
        1,
    )

    config = ludic.Root.open(url).read("attempts/1.json").decode()
    assert '"lr": 1e-05' in config
    assert '"path": "data"' in config
    assert not [each for each in ("hf_secret", "def", "uvw", "xyz", "qqq") if each in config]
    [claim] = claims_of(url)
    assert claim.ended_at is not None
    assert claim.lost is None


def test_advantages_are_those_of_all_rows_since_the_last_step_in_order_or_none(url: str):
    with ludic.record(url, model=MODEL) as recorder:
        recorder.step(1)
        ids = [*recorder.append([group(0)]), *recorder.append([group(1)])]
        recorder.append([group(2, purpose="eval")])
        with pytest.raises(ConfigError, match="step 2: there are 12 advantages, and 8 rows were appended"):
            recorder.step(2, advantages=range(12))
        recorder.step(2, advantages=np.arange(8), dropped={ids[7]: "last"})
        recorder.append([group(3)])
        recorder.step(3)
    empty, second, third = ledger_of(url).values()
    assert empty == []
    assert [(row["rollout_id"], row["advantage"]) for row in second] == list(zip(ids, range(8), strict=True))
    assert [row["used"] for row in second] == [True] * 7 + [False]
    assert [row["advantage"] for row in third] == [None] * 4
    assert len(rows_of(url, "evals")) == 4
    assert [problem for problem in problems_of(url) if "step_gaps" not in problem] == []


def test_groups_come_as_rollouts_and_as_arrow_too(url: str):
    batch = make_batch(num_groups=2, group_size=3, response_length=8)
    groups = [RolloutGroup(key="mine", rollouts=tuple(map(of_model, group.rollouts))) for group in batch.groups]
    table = pa.Table.from_pylist([{**row, "group_id": name} for name in "ab" for row in group(ord(name))]).take(
        [0, 4, 1, 5, 2, 6, 3, 7]
    )
    with ludic.record(url, model=MODEL) as recorder:
        ids = recorder.append([groups[0], groups[1].rollouts])
        of_table = recorder.append(table)
    rows = {row["rollout_id"]: row for row in rows_of(url)}
    assert ids == [rollout.rollout_id for group in groups for rollout in group.rollouts]
    assert [rows[name]["group_key"] for name in ids[:3]] == ["mine"] * 3
    assert [rows[name]["group_id"] for name in of_table] == ["a", "b"] * 4
    assert [rows[name]["group_index"] for name in of_table] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert problems_of(url) == []


def of_model(rollout: ludic.Rollout) -> ludic.Rollout:
    return replace(rollout, model=MODEL)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"rewards": 1.0}, "group 0, row 0: column 'rewards' is unknown; did you mean"),
        (
            {"response_tokens": [1.5] * 6},
            "group 0, row 0: response_tokens: holds numbers that int32 can't hold, such as 1.5",
        ),
        ({"response_tokens": 5}, "response_tokens: has 0 dimensions, wanted 1"),
        ({"response_tokens": [2**70] * 6}, "group 0, row 0: response_tokens: "),
        ({"response_logprobs": [-0.5]}, "response_logprobs has length 1, response_tokens has 6"),
        ({"action_mask": [True]}, "action_mask has length 1, response_tokens has 6"),
        ({"action_mask": []}, "action_mask has length 0, response_tokens has 6"),
        (
            {"response_tokens": [100] * 6},
            "response_tokens is 100 at token 0, and 5 more, wanted a token id from 0 to 99",
        ),
        ({"episode_reward": "high"}, "group 0, row 0: episode_reward is 'high', wanted a number"),
        ({"episode_reward": math.nan}, "the reward is nan, wanted a finite float32"),
        ({"model": "another"}, "model is 'another', and .* records 'somebody/model'"),
        ({"prompt_tokens": None}, "there is no prompt_tokens; wanted prompt_tokens, response_tokens, episode_reward"),
        ({"response_logprobs": None, "capture": "sampler"}, "there are no response_logprobs, and capture is 'sampler'"),
        ({"x_source": "web"}, "column 'x_source' is unknown"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "group 0, row 0: messages: "),
        ({"agent_steps": [{"turns": 1}]}, "agent_steps: field 'turns' is unknown"),
        ({"group_id": ["a"]}, r"group_id is \['a'\], wanted str"),
        ({"agent_id": ["a"]}, "group 0: a value has the wrong type, TypeError was raised: unhashable type: 'list'"),
        ({"episode_reward": 2**70}, "a column can't hold a value of its rows: "),
    ],
)
def test_a_bad_row_refuses_the_call_by_name_and_nothing_is_stored(
    url: str, tmp_path: Path, columns: dict[str, Any], said: str
):
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    with ludic.record(url, model=MODEL, model_folder=tmp_path) as recorder:
        with pytest.raises(InvalidBatchError, match=said):
            recorder.append([group(0, **columns), group(1)])
        recorder.append([group(2)])
        recorder.step(1)
    assert len(rows_of(url)) == 4
    assert not recorder.lost


def test_rows_without_logprobs_say_so_and_episodes_may_have_several_rows(url: str):
    rows = [{**row, "response_logprobs": None, "episode_id": name} for row, name in zip(group(0), "abab", strict=True)]
    with ludic.record(url, model=MODEL, extra_columns={"x_source": "string"}) as recorder:
        recorder.append([[{**row, "x_source": "web"} for row in rows]])
    found = rows_of(url)
    assert [row["capture"] for row in found] == ["ids"] * 4
    assert [row["response_logprobs"] for row in found] == [[0.0] * 6] * 4
    assert [(row["group_index"], row["group_size"], row["segment_index"]) for row in found] == [
        (0, 2, 0), (1, 2, 0), (0, 2, 1), (1, 2, 1),
    ]  # fmt: skip
    assert [sum(row["token_rewards"]) for row in found] == [0, 0, 2, 3]
    assert [row["x_source"] for row in ludic.open(url).sql("from rollouts").iter_rows(named=True)] == ["web"] * 4


def test_rows_that_do_not_say_how_they_were_sampled_have_the_callers_settings_or_the_roots(url: str):
    with ludic.record(url, model=MODEL, env="maths", temperature=0.5, top_k=20, max_tokens=64) as recorder:
        recorder.append([group(0)])
    with ludic.record(url) as recorder:
        recorder.append([group(1, top_p=0.5)])
    with ludic.record(url, env="code", top_k=0, max_tokens=128) as recorder:
        recorder.append([group(2)])
    names = ("env_name", "temperature", "top_p", "top_k", "max_tokens")
    found = [tuple(row[name] for name in names) for row in rows_of(url)[::4]]
    assert found == [("maths", 0.5, 1, 20, 64), ("maths", 0.5, 0.5, 20, 64), ("code", 0.5, 1, None, 128)]


def test_tensors_are_taken_as_numbers(url: str):
    torch = pytest.importorskip("torch")
    rows = [
        {
            "prompt_tokens": torch.tensor([1, 2]),
            "response_tokens": torch.tensor([3, 4, 5]),
            "response_logprobs": torch.tensor([-0.5, -1.0, 0.0], dtype=torch.bfloat16, requires_grad=True),
            "action_mask": torch.tensor([1, 1, 0]),
            "episode_reward": torch.tensor(0.25),
            "reward_components": {"format": torch.tensor(0.25)},
        }
    ]
    with ludic.record(url, model=MODEL) as recorder:
        recorder.append([rows])
        advantages = torch.tensor([0.5], requires_grad=True)
        recorder.step(1, advantages=advantages, metrics={"loss": torch.tensor(0.125), "huge": 10**400})
    [row] = rows_of(url)
    assert row["response_logprobs"] == [-0.5, -1.0, 0.0]
    assert row["action_mask"] == [True, True, False]
    assert (row["episode_reward"], row["reward_components"]) == (0.25, [("format", 0.25)])
    assert [row["advantage"] for row in ledger_of(url)[1, 1]] == [0.5]
    assert metrics_of(url)[0]["loss"] == 0.125


def test_a_group_or_a_row_is_appended_once(url: str):
    rows = group(0, group_id="mine")
    with ludic.record(url, model=MODEL) as recorder:
        recorder.append([rows])
        with pytest.raises(InvalidBatchError, match="its group, mine, was appended before"):
            recorder.append([rows])
        with pytest.raises(
            ConfigError, match="advantages names rollout mine, which was not appended and is in no file"
        ):
            recorder.step(1, advantages={"mine": 1.0})
        with pytest.raises(ConfigError, match="metrics: 'loss' is 'low', wanted a number"):
            recorder.metrics(1, {"loss": "low"})
        with pytest.raises(ConfigError, match="n is 0, wanted a whole number from 1"):
            recorder.step(0)
        with pytest.raises(ConfigError, match=r"step 1: advantages is 0.5, wanted a mapping of rollout_id"):
            recorder.step(1, advantages=0.5)
        with pytest.raises(ConfigError, match="dropped is list, wanted a mapping"):
            recorder.step(1, dropped=["mine"])
    with pytest.raises(ConfigError, match="this recorder was closed; call"):
        recorder.append([group(1)])


# --- Lives -----------------------------------------------------------------------------------------------------------


def test_a_later_life_takes_steps_again_and_rows_of_the_earlier_one_stay(url: str, caplog: pytest.LogCaptureFixture):
    earlier = ludic.record(url, model=MODEL, temperature=1.0)
    for n in range(1, 6):
        earlier.append([group(n)])
        earlier.step(n)
    with ludic.record(url, temperature=0.5) as later:
        there = "the root has steps up to 5; steps that this life repeats supersede them"
        assert later.describe() == f"records to {url}, life 1; {there}"
        later.append([group(10)])
        assert rows_after_flush(later, url)[-1]["policy_version"] == 5
        later.version = 2
        [first, *_] = later.append([group(11)])
        later.step(3, advantages={first: 1.0})
        assert "this life supersedes steps 3 to 5 of attempt 1" in caplog.text
        assert "attempt 1 of" in caplog.text
        assert "has not released its lease; this recorder takes over its steps" in caplog.text
        earlier.append([group(20)])
        earlier.step(6)
        later.append([group(12)])
        later.step(4)
    earlier.close()

    assert [(attempt_id, step) for attempt_id, step in ledger_of(url)] == [(1, 1), (1, 2), (2, 3), (2, 4)]
    assert parents_of(url, [1, 2]) == [None, (1, 2)]
    assert len(rows_of(url)) == 9 * 4
    assert earlier.lost.steps == [(6, 7)] or earlier.lost.steps == ((6, 7),)
    assert "has taken the steps over" in str(earlier.lost)
    assert [(claim.slot, claim.life) for claim in claims_of(url)] == [(0, 1), (1, 1)]
    assert claims_of(url)[0].lost["steps"] == [[6, 7]]
    query = "select step, superseded, count(*) as n from all_batches group by all order by all"
    superseded = [row for row in ludic.open(url).sql(query).rows() if row[1]]
    assert superseded == [(3, True, 4), (4, True, 4), (5, True, 4)]
    assert problems_of(url) == []


def rows_after_flush(recorder: Any, url: str) -> list[dict[str, Any]]:
    assert recorder.flush()
    return rows_of(url)


def test_a_step_that_goes_back_begins_a_new_attempt(url: str):
    with ludic.record(url, model=MODEL) as recorder:
        for n in (1, 2, 3, 2, 3):
            recorder.append([group(10 * n + recorder.version)])
            recorder.step(n, metrics={"loss": n})
    assert list(ledger_of(url)) == [(1, 1), (2, 2), (2, 3)]
    assert [(row["attempt_id"], row["step"]) for row in metrics_of(url)] == [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3)]
    assert problems_of(url) == []


def test_a_slot_goes_to_the_next_life_once_its_life_is_over(url: str):
    with ludic.record(url, model=MODEL), ludic.record(url), ludic.record(url):
        pass
    with ludic.record(url, model=MODEL):
        found = [(claim.slot, claim.life, claim.ended_at is None) for claim in claims_of(url)]
    assert found == [(0, 1, False), (0, 2, True), (1, 1, False), (2, 1, False)]


def test_another_model_or_other_columns_or_a_run_of_ludic_are_refused_by_name(url: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="holds no run yet, so it needs the name of the model"):
        ludic.record(url)
    assert not Path(url).exists()
    with pytest.raises(ConfigError, match="Protocol not known: nothing"):
        ludic.record("nothing://run", model=MODEL)
    ludic.record(url, model=MODEL, extra_columns={"x_a": "string"}).close()
    with pytest.raises(ConfigError, match="was started with model 'somebody/model', and 'other' was given"):
        ludic.record(url, model="other")
    with pytest.raises(ConfigError, match=r"was started with extra_columns {'x_a': 'string'}, and {} was given"):
        ludic.record(url, extra_columns={})
    own = put_run(str(tmp_path / "own"), RunConfig(model=MODEL, env=("moar_cats",)))
    attempt = start_attempt(own)
    with pytest.raises(ConfigError, match="is a run that ludic trained, last as attempt 1"):
        ludic.record(own.url)
    lease = {**json.loads(own.read("attempts/1.lease")), "released": False}
    del lease["digest"]
    own.put("attempts/1.lease", json.dumps(lease).encode())
    with pytest.raises(OwnedError, match=f"ludic trains this run, as attempt {attempt.attempt_id} of"):
        ludic.record(own.url)


def test_the_weights_of_a_recorded_model_are_not_known_and_its_configuration_is(url: str, tmp_path: Path):
    folder, weights = tmp_path / "kept", tmp_path / "weights"
    for each in (folder, weights):
        each.mkdir()
        (each / "config.json").write_text('{"vocab_size": 100}')
        (each / "tokenizer.json").write_text("{}")
    (weights / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(ConfigError, match=r"which holds no config\.json"):
        ludic.record(url, model=MODEL, model_folder=tmp_path)
    ludic.record(url, model=MODEL, model_folder=folder).close()
    root = ludic.Root.open(url)
    assert problems_of(url) == []
    with first_model(root, str(weights)) as found:
        assert found == weights
    (weights / "tokenizer.json").write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer differs \(tokenizer.json\)"), first_model(root, str(weights)):
        pass


def test_several_threads_and_several_recorders_append_at_once(url: str):
    with ludic.record(url, model=MODEL) as one, ludic.record(url, model=MODEL) as two:

        def append(recorder: Any, seed: int) -> None:
            for number in range(10):
                recorder.append([group(seed + number)])

        threads = [threading.Thread(target=append, args=(each, seed)) for seed, each in enumerate([one, one, two, two])]
        for thread in threads:
            thread.start()
        for n in range(1, 6):
            one.step(n)
        for thread in threads:
            thread.join()
        one.step(6)
    assert len(rows_of(url)) == 4 * 10 * 4
    of_steps = [row["rollout_id"] for rows in ledger_of(url).values() for row in rows]
    assert len(of_steps) == len(set(of_steps)) == 80
    assert [problem for problem in problems_of(url) if "step_gaps" not in problem] == []


def test_a_step_may_name_rows_that_another_recorder_or_an_earlier_life_has_stored(url: str):
    with ludic.record(url, model=MODEL) as earlier:
        [old, *_] = earlier.append([group(0)])
    with ludic.record(url) as sampler, ludic.record(url) as trainer:
        theirs = [name for seed in range(1, 4) for name in sampler.append([group(seed)])]
        mine = trainer.append([group(5)])
        assert sampler.flush()
        trainer.step(1, advantages=dict.fromkeys([*theirs, *mine], 0.5), dropped={old: "too old"})
        trainer.step(2, advantages={theirs[0]: 1.0})
    first, second = ledger_of(url).values()
    assert [(row["rollout_id"], row["reason"]) for row in first] == [
        *((name, None) for name in [*theirs, *mine]),
        (old, "too old"),
    ]
    assert [(row["rollout_id"], row["num_uses"]) for row in second] == [(theirs[0], 2)]
    assert problems_of(url) == []


def test_a_trainer_that_only_takes_steps_knows_and_reads_within_bounds(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorder, "MOST_KNOWN_ROWS", 8)
    monkeypatch.setattr(life, "MOST_KNOWN_ROWS", 3)  # fewer than rows of a file
    with ludic.record(url, model=MODEL) as sampler, ludic.record(url) as trainer:
        ids = []
        for n in range(1, 7):
            ids.append(sampler.append([group(n)]))
            assert sampler.flush()
            trainer.step(n, advantages=dict.fromkeys(ids[-1], 1.0))
            assert len(trainer._known) <= 8
            assert len(trainer._life._others) <= 3
        trainer.step(7, advantages={ids[0][0]: 1.0})
    assert [len(rows) for rows in ledger_of(url).values()] == [4] * 6 + [1]
    assert problems_of(url) == []


def test_a_file_that_can_not_be_read_holds_up_no_step_that_looks_for_rows(url: str, monkeypatch: pytest.MonkeyPatch):
    with ludic.record(url, model=MODEL) as sampler, ludic.record(url) as trainer:
        first, second = sampler.append([group(1)]), sampler.append([group(2, policy_version=5)])
        assert sampler.flush()
        read = life._read_known

        def fail_for_newer(root: Any, file: Any, wanted: Any) -> Any:
            if file.version == 5:
                raise StoreError(f"{file.name}: Permission denied")
            return read(root, file, wanted)

        monkeypatch.setattr(life, "_read_known", fail_for_newer)
        trainer.step(1, advantages={first[0]: 1.0, second[0]: 1.0})
        monkeypatch.setattr(life, "_read_known", read)
        with pytest.raises(ConfigError, match="names rollout nobody, which was not appended"):
            trainer.step(2, advantages={"nobody": 1.0})
        trainer.step(2, advantages={second[0]: 1.0})
    first_step, second_step = ledger_of(url).values()
    assert [row["rollout_id"] for row in first_step] == [first[0]]
    assert [row["rollout_id"] for row in second_step] == [second[0]]
    assert trainer.lost.steps == ((1, 2),)


def test_a_search_for_rows_ends_when_the_step_does_not_wait_for_it_any_more(url: str, monkeypatch: pytest.MonkeyPatch):
    read, num_read = life._read_known, 0

    def read_slowly(*given: Any) -> Any:
        nonlocal num_read
        num_read += 1
        time.sleep(0.05)
        return read(*given)

    with ludic.record(url, model=MODEL) as sampler, ludic.record(url) as trainer:
        ids = sampler.append([group(version, size=1, policy_version=version) for version in range(30)])
        assert sampler.flush()
        monkeypatch.setattr(life, "_read_known", read_slowly)
        monkeypatch.setattr(recorder, "STEP_S", 0.2)
        trainer.step(1, advantages={ids[0]: 1.0, ids[29]: 1.0})
        assert trainer.flush()
    assert num_read < 10
    assert [row["rollout_id"] for row in ledger_of(url)[1, 1]] in ([], [ids[29]])
    assert trainer.lost.steps == ((1, 2),)


def test_numbers_of_many_steps_to_come_leave_those_of_this_step(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorder, "_MOST_OPEN_STEPS", 3)
    with ludic.record(url, model=MODEL) as recording:
        recording.step(1, metrics={"loss": 1})
        for n in range(2, 7):
            recording.metrics(n, {"loss": n})
        recording.step(2)
    assert [row["loss"] for row in metrics_of(url)] == [1, 2]
    assert recording.lost.steps_without_metrics == ((3, 7),)


def test_what_a_caller_writes_into_its_arrays_later_does_not_reach_the_root(url: str):
    length = 5
    row = {
        "prompt_tokens": np.arange(3, dtype=np.int32),
        "response_tokens": np.arange(length, dtype=np.int32),
        "response_logprobs": np.full(length, -0.5, np.float32) * np.array([1, 1, 1, 1, 0], np.float32),
        "token_rewards": np.arange(length, dtype=np.float32),
        "action_mask": np.array([True, True, True, True, False]),
        "episode_reward": np.array(10.0),
        "metadata": {"source": "web"},
        "messages": [{"role": "user", "content": "hello"}],
    }
    advantages = np.ones(length, np.float32)
    with ludic.record(url, model=MODEL) as recording:
        [name] = recording.append([[row]])
        for value in row.values():
            if isinstance(value, np.ndarray):
                value[...] = 0
        row["metadata"]["source"] = row["messages"][0]["content"] = "changed"
        recording.append([group(1)])
        recording.step(1, advantages={name: advantages})
        advantages[:] = 7
    stored = rows_of(url)[0]
    assert (stored["prompt_tokens"], stored["response_tokens"]) == ([0, 1, 2], [0, 1, 2, 3, 4])
    assert (stored["response_logprobs"], stored["token_rewards"]) == ([-0.5] * 4 + [0], [0, 1, 2, 3, 4])
    assert (stored["action_mask"], stored["episode_reward"]) == ([True] * 4 + [False], 10)
    assert (stored["metadata"], stored["messages"][0]["content"]) == ([("source", "web")], "hello")
    assert ledger_of(url)[1, 1][0]["token_advantages"] == [1] * length


def test_a_recorder_that_is_closed_by_an_error_lets_the_error_through(url: str):
    recording = ludic.record(url, model=MODEL, stop_on_failure=True)
    recording.lose(1, 2, "a test")
    with pytest.raises(KeyboardInterrupt), recording:
        raise KeyboardInterrupt
    recording = ludic.record(url, stop_on_failure=True)
    recording.lose(1, 2, "a test")
    with pytest.raises(StoreError, match="2 rollouts in 1 group"), recording:
        pass


def test_a_life_that_was_taken_over_does_not_take_steps_back(url: str):
    earlier = ludic.record(url, model=MODEL)
    earlier.step(1)
    earlier.step(2)
    with ludic.record(url) as later:
        later.step(2)
        earlier.step(2)  # its lease says so within seconds; until then it has to look
        later.step(3)
    earlier.close()
    assert list(ledger_of(url)) == [(1, 1), (2, 2), (2, 3)]
    assert earlier.lost.steps == ((2, 3),)
    said = f"attempt 2 of {owner_name()} has taken the steps over, and this process records no more steps"
    assert said in str(earlier.lost)
    assert "this trainer stops" not in str(earlier.lost)
    assert not later.lost


def test_a_second_program_of_this_machine_adds_rows_or_is_refused_or_takes_over(url: str):
    with ludic.record(url, model=MODEL) as first:
        first.step(1)
    root, lease = ludic.Root.open(url, writable=True), read_lease(ludic.Root.open(url), 1)
    assert lease is not None
    with subprocess.Popen(["sleep", "60"]) as program:
        held = replace(lease, released=False, process=describe_process(program.pid))
        root.put("attempts/1.lease", encode_record(held))
        with pytest.raises(OwnedError, match=r"records the steps here as attempt 1 .*pass take_over=True"):
            ludic.record(url, take_over=False)
        ludic.record(url, take_over=True).close()
        ludic.record(url).close()
        root.put("attempts/1.lease", encode_record(replace(held, process=f"elsewhere {held.process}")))
        ludic.record(url, take_over=False).close()
        root.put("attempts/1.lease", encode_record(held))
        program.kill()
    ludic.record(url, take_over=False).close()


def test_rows_that_are_lost_without_a_group_are_named_too(url: str):
    with ludic.record(url, model=MODEL) as recording:
        recording.lose(0, 2, "their rank failed")
    assert str(recording.lost) == "lost: 2 rollouts (their rank failed)"


def test_a_step_of_more_rows_than_are_known_has_to_name_them(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorder, "MOST_KNOWN_ROWS", 8)
    with ludic.record(url, model=MODEL) as recording:
        ids = [name for n in range(4) for name in recording.append([group(n)])]
        with pytest.raises(
            ConfigError, match="16 rows were appended since the step before, and the newest 8 are known"
        ):
            recording.step(1)
        assert recording.flush()
        recording.step(1, advantages=dict.fromkeys(ids, 1.0))
        recording.append([group(5)])
        recording.step(2)
    assert [len(rows) for rows in ledger_of(url).values()] == [16, 4]
    assert problems_of(url) == []
