"""Where a reference's logprobs come from: the model, or what was kept under the root."""

import logging
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiny_runs import fill, make_model, query, train_here

from ludic.errors import ConfigError, SchemaError
from ludic.models.lora import add_adapters
from ludic.records.tables import arrow_schema
from ludic.root.maintenance.verify import check_root
from ludic.root.rows.parquet import encode_plain
from ludic.root.rows.tables import read_reference, read_reference_index, write_reference
from ludic.training.batches.packing import Sequences, cap, pack
from ludic.training.config import TrainConfig
from ludic.training.inherited_settings import replay_settings
from ludic.training.model import load_model, load_sharded, shard
from ludic.training.reference import CachedReference, fingerprint, model_reference

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
MODEL = "0123456789abcdef" * 2


class Counting:
    """A reference that notes how many micro-batches it computes."""

    def __init__(self, model):
        self.num_computed = 0
        self._run = model_reference(model, CPU)

    def __call__(self, batches):
        self.num_computed += len(batches)
        return self._run(batches)


@pytest.fixture
def counting(mesh, tiny_model):
    return Counting(tiny_model())


def rows(lengths, *, temperature=1.0):
    """A table of rollouts r0, r1, ..., whose logprobs are -0, -1, -2, ..."""
    columns = {
        "model": [MODEL] * len(lengths),
        "rollout_id": [f"r{number}" for number in range(len(lengths))],
        "temperature": [temperature] * len(lengths),
        "response_length": lengths,
        "reference_logprobs": [-np.arange(length, dtype=np.float32) - 100 * i for i, length in enumerate(lengths)],
    }
    schema = arrow_schema("reference")
    return pa.table([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


def test_rows_are_found_wherever_they_lie_in_a_file(run_root):
    lengths = [1 + number % 3 for number in range(50)]  # four row groups of 16
    index = write_reference(run_root, MODEL, rows(lengths))
    assert read_reference_index(run_root, MODEL).sort_by("row").to_pylist() == index.to_pylist()
    row_of = {row["rollout_id"]: row["row"] for row in index.to_pylist()}
    (name,) = run_root.list("reference")
    wanted = [49, 3, 17, 16, 15]
    found = read_reference(run_root, name, [row_of[f"r{i}"] for i in wanted])
    assert [part.tolist() for part in found] == [[-100.0 * i - k for k in range(lengths[i])] for i in wanted]


def test_the_same_rows_are_one_file_whoever_writes_them(run_root):
    write_reference(run_root, MODEL, rows([1, 2]))
    write_reference(run_root, MODEL, rows([1, 2]).take([1, 0]))
    assert len(run_root.list("reference")) == 1
    write_reference(run_root, MODEL, rows([1, 3]))
    assert len(run_root.list("reference")) == 2


def test_nothing_to_keep_is_no_file(run_root):
    assert write_reference(run_root, MODEL, rows([])).num_rows == 0
    assert run_root.list("reference") == []


def test_a_second_pass_does_not_run_the_model(run_root, counting, sequences):
    batches = [pack(sequences(4, seed)) for seed in (1, 2)]
    expected = counting(batches)
    cache = CachedReference(counting, run_root, MODEL, CPU)
    assert all(torch.equal(a, b) for a, b in zip(cache(batches), expected, strict=True))
    assert counting.num_computed == 4
    # In another order and packing, by this process and by the next.
    some = sequences(4, 2)[::-1] + sequences(4, 1)
    for again in (cache, CachedReference(counting, run_root, MODEL, CPU)):
        found = torch.cat(again([pack(some[:3]), pack(some[3:])]))
        assert torch.allclose(
            found, model_reference(load_model(run_root.record.model), CPU)([pack(some)])[0], atol=1e-5
        )
    assert counting.num_computed == 4


def test_only_what_is_missing_is_computed_and_then_kept(run_root, counting, sequences):
    cache, old, new = CachedReference(counting, run_root, MODEL, CPU), sequences(2, 1), sequences(2, 2)
    cache([pack(old)])
    cache([pack(old), pack([old[0], new[0]])])
    assert counting.num_computed == 2
    assert read_reference_index(run_root, MODEL).num_rows == 3
    cache([pack([new[0], old[1]])])
    assert counting.num_computed == 2


def test_another_model_and_another_temperature_are_not_found(run_root, counting, sequences):
    some = sequences(2, 1)
    CachedReference(counting, run_root, MODEL, CPU)([pack(some)])
    CachedReference(counting, run_root, "f" * 32, CPU)([pack(some)])
    assert counting.num_computed == 2
    warmer = [replace(sequence, temperature=1.5) for sequence in some]
    CachedReference(counting, run_root, MODEL, CPU)([pack(warmer)])
    assert counting.num_computed == 3


def test_a_capped_sequence_does_not_stand_for_the_whole_one_but_the_whole_one_for_it(run_root, counting, sequences):
    one = next(s for s in sequences(9, 1) if len(s.response_tokens) > 5)
    short = cap(Sequences.of([one]), len(one.prompt_tokens) + 3)[0]
    cache = CachedReference(counting, run_root, MODEL, CPU)
    cache([pack(short)])
    (whole,) = cache([pack([one])])
    assert counting.num_computed == 2
    assert len(whole) == len(one.response_tokens)
    for each in (cache, CachedReference(counting, run_root, MODEL, CPU)):
        assert torch.equal(each([pack(short)])[0], whole[:3])
        assert torch.equal(each([pack([one])])[0], whole)
    assert counting.num_computed == 2


def test_a_file_that_is_gone_or_broken_is_computed_again(run_root, counting, sequences, caplog):
    batch = pack(sequences(3, 1))
    cache = CachedReference(counting, run_root, MODEL, CPU)
    (expected,) = cache([batch])
    (name,) = run_root.list("reference")
    data = run_root.read(name)
    for broken in (data[:-10], data[:100] + b"\0" * (len(data) - 200) + data[-100:], None):
        run_root.delete(name)
        if broken is not None:
            run_root.put(name, broken)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert torch.equal(cache([batch])[0], expected)
        assert "computed again" in caplog.text
    assert counting.num_computed == 4
    run_root.put(name, data[:-10])
    CachedReference(counting, run_root, MODEL, CPU)([batch])
    with pytest.raises(SchemaError, match="delete it: it is a cache"):
        read_reference(run_root, name, [0])
    assert [finding.where for finding in check_root(run_root).findings] == [name]


def test_verify_knows_the_folder(run_root, counting, sequences):
    CachedReference(counting, run_root, MODEL, CPU)([pack(sequences(3, 1))])
    assert list(check_root(run_root).findings) == []
    (name,) = run_root.list("reference")
    run_root.put(name.replace(MODEL, "e" * 32), run_root.read(name))
    (finding,) = check_root(run_root).findings
    assert (finding.check, finding.problem) == ("misnamed", f"holds rows that belong in {name}")
    run_root.put("reference/notes.parquet", run_root.read(name))
    assert len(check_root(run_root).findings) == 2


def test_a_killed_writer_leaves_whole_files_only(run_root):
    script = Path(__file__).with_name("keep_until_killed.py")
    writer = subprocess.Popen([sys.executable, str(script), run_root.url, MODEL])
    while len(run_root.list("reference")) < 5:
        assert writer.poll() is None
        time.sleep(0.01)
    writer.kill()
    writer.wait()
    names = run_root.list("reference")
    assert list(check_root(run_root).findings) == []
    assert read_reference_index(run_root, MODEL).num_rows == 200 * len(names)


def test_fingerprints_are_of_weights_settings_and_dtype_and_leave_adapters_out(mesh, tmp_path, tiny_model):
    def of(model, dtype=torch.float32):
        shard(model, mesh)
        return fingerprint(model, dtype)

    one = of(tiny_model())
    tiny_model().save_pretrained(tmp_path / "elsewhere")
    assert of(load_model(str(tmp_path / "elsewhere"))) == one
    adapted = tiny_model()
    add_adapters(adapted, source="base", rank=2, alpha=4)
    assert of(adapted) == one
    other = tiny_model()
    other.config.rms_norm_eps *= 2
    changed = tiny_model()
    with torch.no_grad():
        changed.model.norm.weight[3] += 1e-6
    assert len({one, of(other), of(changed), of(tiny_model(), torch.bfloat16), of(tiny_model(seed=1))}) == 5
    assert len(one) == 32


def test_an_offloaded_reference_gives_the_same_numbers(mesh, model_folder, sequences):
    batches = [pack(sequences(4, seed)) for seed in (1, 2)]
    plain, offloaded = (load_sharded(str(model_folder), mesh, offload=offload) for offload in (False, True))
    for one, other in zip(model_reference(plain, CPU)(batches), model_reference(offloaded, CPU)(batches), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("setting", ["reference_offload", "reference_cache"])
def test_settings_of_a_reference_without_one_are_refused(setting):
    with pytest.raises(ConfigError, match=f"{setting} is True but there is no reference; set reference to a model"):
        TrainConfig.of(**{setting: True})


@pytest.fixture
def other_model(tmp_path):
    """Another folder than the run's, with other weights."""
    folder = make_model(tmp_path / "other")
    model = load_model(folder)
    with torch.no_grad():
        model.model.norm.weight.add_(0.5)
    model.save_pretrained(folder)
    return folder


def test_a_run_keeps_its_references_logprobs_and_a_second_epoch_finds_them(new_root, other_model):
    numbers = {}
    for name, settings in {
        "plain": {},
        "cached": {"reference_cache": True},
        "offloaded": {"reference_offload": True},
    }.items():
        root = new_root(name)
        fill(root, num_files=1)
        train_here(root, num_steps=3, max_uses=2, reference=other_model, kl_weight=0.1, **settings)
        numbers[name] = query(root, "select reference_kl, loss from metrics order by step")
        kept = pa.concat_tables([pq.read_table(root.at(file)) for file in root.list("reference")] or [rows([])])
        used = query(root, "select count(distinct rollout_id) from batches where used")[0][0]
        assert kept.num_rows == (used if name == "cached" else 0)
        if name == "cached":
            assert list(check_root(root).findings) == []
    assert numbers["cached"] == [pytest.approx(row, abs=1e-6) for row in numbers["plain"]]
    assert numbers["offloaded"] == numbers["plain"]


def test_a_run_that_goes_on_reads_what_is_kept(new_root, other_model):
    """Numbers that no model gave show where they came from."""
    root = new_root()
    fill(root, num_files=1, groups_per_file=2)
    settings = {"reference": other_model, "reference_cache": True, "max_uses": 4}
    train_here(root, num_steps=2, **settings)
    for name in root.list("reference"):
        table = pq.read_table(root.at(name))
        lists = [[-50.0] * length for length in table["response_length"].to_pylist()]
        field = table.schema.field("reference_logprobs")
        changed = table.set_column(4, field, pa.array(lists, field.type)).replace_schema_metadata(None)
        Path(root.at(name)).write_bytes(encode_plain(changed))
    train_here(root, num_steps=4, **settings)
    before, after = query(root, "select avg(reference_kl) from metrics group by step > 2 order by step > 2")
    assert before[0] < 1
    assert after[0] > 1


def test_a_shared_reference_can_not_be_off_loaded(new_root, tiny_folder):
    root = new_root()
    with pytest.raises(ConfigError, match="reference is the model that LoRA trains, which can't be off-loaded"):
        train_here(root, num_steps=1, lora_rank=2, reference=tiny_folder, reference_offload=True)


def test_an_offline_run_and_a_replay_find_what_their_sources_keep(new_root, other_model):
    source, offline, again = new_root("source"), new_root("offline"), new_root("again")
    fill(source, num_files=1)
    settings = {"reference": other_model, "reference_cache": True}
    train_here(source, num_steps=2, **settings)
    train_here(offline, offline=True, sources=(source.url,), epochs=1, **settings)
    assert source.list("reference")
    assert offline.list("reference") == []
    train_here(again, **replay_settings(offline.url), reference_cache=True, replay_batches=offline.url)
    assert again.list("reference")  # a replay looks into the run that it replays, which keeps nothing itself
