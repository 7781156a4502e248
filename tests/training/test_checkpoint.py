import contextlib
import json
import os
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filesystems import CRASHES, Fault, FaultyFileSystem, ProcessDied, SharedStorage
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file, save_file
from tiny_models import whole
from tiny_runs import save_checkpoint

from ludic.errors import FencedError, ModelError, NameTakenError, SchemaError
from ludic.root.attempts import checkpoint_to_resume, complete_checkpoints, folder_of, prune_checkpoints, start_attempt
from ludic.root.claims import claim
from ludic.root.json_records import decode_json
from ludic.root.rows.reader import Cursor
from ludic.root.storage.filesystem import Storage
from ludic.run.run_json import put_run, run_of
from ludic.training.checkpoint import load_checkpoint, take_snapshot, write_checkpoint
from ludic.training.config import TrainConfig
from ludic.training.model import full_state_dict, shard
from ludic.training.step import build_optimizer


@pytest.fixture
def trainer(mesh, tiny_model):
    """A sharded model and an optimizer that has stepped, so that its moments are not zero."""

    def build(num_steps=2, **fields):
        model = tiny_model(**fields)
        shard(model, mesh)
        optimizer = build_optimizer(model, TrainConfig.of(learning_rate=1e-2))
        for step in range(num_steps):
            for parameter in model.parameters():
                parameter.grad = parameter.detach() * (step + 1) + 0.1
            optimizer.step()
        return model, optimizer

    return build


def save(root, model, optimizer, *, attempt_id=0, step=1, **fields):
    fields = {"policy_version": 7, "cursor": {"w0": [[0, 4]]}, "config": {"num_steps": 10}} | fields
    return save_checkpoint(root, model, optimizer, attempt_id=attempt_id, step=step, **fields)


def moments(optimizer):
    return [v if k == "step" else whole(v) for s in optimizer.state.values() for k, v in sorted(s.items())]


@pytest.mark.parametrize("tied", [True, False])
def test_weights_moments_and_random_state_come_back_bit_for_bit(run_root, trainer, tied):
    model, optimizer = trainer(tied=tied)
    torch.manual_seed(3)
    info = save(run_root, model, optimizer)
    expected = torch.rand(5)
    other, other_optimizer = trainer(tied=tied, seed=1, num_steps=0)
    load_checkpoint(run_root, info, other, other_optimizer)
    assert torch.equal(torch.rand(5), expected)
    weights = full_state_dict(other)
    assert all(torch.equal(weights[name], tensor) for name, tensor in full_state_dict(model).items())
    assert all(torch.equal(a, b) for a, b in zip(moments(other_optimizer), moments(optimizer), strict=True))


def test_a_resumed_trainer_keeps_its_own_settings(run_root, trainer):
    info = save(run_root, *trainer())
    model, _ = trainer()
    optimizer = build_optimizer(model, TrainConfig.of(weight_decay=0.3, betas=(0.5, 0.6)))
    load_checkpoint(run_root, info, model, optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert {tuple(group["betas"]) for group in optimizer.param_groups} == {(0.5, 0.6)}


def test_the_marker_says_what_the_caller_gave(run_root, trainer):
    info = save(run_root, *trainer(), attempt_id=2, step=5)
    assert complete_checkpoints(run_root) == [info]
    written = decode_json(run_root.read("checkpoints/attempt=2/step=5/checkpoint.json"))
    assert written == {
        "attempt_id": 2,
        "step": 5,
        "policy_version": 7,
        "cursor": {"w0": [[0, 4]]},
        "config": {"num_steps": 10},
        "num_ranks": 1,
        "run_id": run_root.run_id,
        "format_version": 2,
    }


def test_a_checkpoint_without_its_marker_does_not_exist(run_root, trainer):
    model, optimizer = trainer()
    first = save(run_root, model, optimizer, step=1)
    second = save(run_root, model, optimizer, step=2)
    run_root.delete(f"{folder_of(second)}/checkpoint.json")
    assert complete_checkpoints(run_root) == [first]


def test_steps_are_ordered_as_numbers(run_root, trainer):
    model, optimizer = trainer()
    for attempt_id, step in [(0, 10), (0, 9), (1, 2)]:
        save(run_root, model, optimizer, attempt_id=attempt_id, step=step)
    assert [(i.attempt_id, i.step) for i in complete_checkpoints(run_root)] == [(0, 9), (0, 10), (1, 2)]


def test_pruning_keeps_the_newest_whole(run_root, trainer):
    model, optimizer = trainer()
    attempt = start_attempt(run_root)
    infos = [save(run_root, model, optimizer, attempt_id=1, step=step) for step in (1, 2, 3)]
    kept = run_root.list(folder_of(infos[2]))
    assert prune_checkpoints(run_root, attempt, keep=1) == [folder_of(info) for info in infos[:2]]
    assert run_root.list("checkpoints") == kept
    load_checkpoint(run_root, infos[2], model, optimizer)


def test_a_snapshot_is_of_the_moment_it_was_taken(run_root, trainer):
    """Also where the next steps come before it is written, as in a trainer that writes in the background."""
    model, optimizer = trainer()
    expected = save(run_root, model, optimizer, attempt_id=1)
    facts = {"policy_version": 7, "cursor": {}, "config": {}}
    snapshot = take_snapshot(model, optimizer, attempt_id=2, step=1, **facts)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() + 1
    optimizer.step()
    write_checkpoint(run_root, snapshot)
    for file in ("model", "optimizer", "random"):
        first, second = (
            load_file(f"{run_root.path}/{folder_of(info)}/{file}.safetensors") for info in (expected, snapshot.info)
        )
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first), file


def test_files_are_on_the_disk_before_they_can_get_their_marker(run_root, trainer, monkeypatch):
    """After a power cut a marker must not stand beside files that were lost."""
    model, optimizer = trainer()
    facts = {"policy_version": 7, "cursor": {}, "config": {}}
    snapshot = take_snapshot(model, optimizer, attempt_id=1, step=1, **facts)
    synced, synced_at_checks = set(), []
    fsync = os.fsync

    def note(descriptor):
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    write_checkpoint(run_root, snapshot, check=lambda: synced_at_checks.append(set(synced)))
    files = {Path(name).name for name in run_root.list(folder_of(snapshot.info))}
    assert {"model.safetensors", "optimizer.safetensors", "random.safetensors"} < files
    assert synced_at_checks[0] == files - {"checkpoint.json"}  # before they are moved into the root


def test_a_trainer_that_was_fenced_prunes_nothing(run_root, trainer):
    attempt, before = start_attempt(run_root), None
    for step in (1, 2):
        save(run_root, *trainer(), attempt_id=1, step=step)
    before = run_root.list("checkpoints")
    claim(run_root, 1)
    with pytest.raises(FencedError, match="attempt 1 was replaced by attempt 2"):
        prune_checkpoints(run_root, attempt, keep=1)
    assert run_root.list("checkpoints") == before


def test_what_an_earlier_attempt_left_incomplete_is_pruned_and_ones_own_is_not(run_root, trainer):
    for attempt_id in (1, 2):
        attempt = start_attempt(run_root)
        run_root.put(f"checkpoints/attempt={attempt_id}/step=9/model.safetensors", b"half of it")
    info = save(run_root, *trainer(), attempt_id=2, step=10)
    assert prune_checkpoints(run_root, attempt, keep=1) == ["checkpoints/attempt=1/step=9"]
    assert {name.rpartition("/")[0] for name in run_root.list("checkpoints")} == {
        "checkpoints/attempt=2/step=9",
        folder_of(info),
    }


@pytest.mark.parametrize("crash", CRASHES)
@pytest.mark.parametrize("num_calls", range(8))
def test_a_checkpoint_whose_upload_is_cut_anywhere_does_not_exist_or_is_whole(run_root, trainer, num_calls, crash):
    storage = SharedStorage(MemoryFileSystem())
    root = put_run(f"memory://{uuid.uuid4()}", run_of(run_root), fs=FaultyFileSystem(storage))
    model, optimizer = trainer()
    first = save(root, model, optimizer, step=1)
    root.fs.faults.extend([None] * num_calls + [crash])
    with contextlib.suppress(ProcessDied):
        save(root, model, optimizer, step=2)
    after = replace(root, fs=FaultyFileSystem(storage))
    found = complete_checkpoints(after)
    assert found[0] == first
    for info in found:
        load_checkpoint(after, info, model, optimizer)
    # Two configurations, weights, moments, random states, digests; then the marker.
    is_there = num_calls > 6 or (num_calls, crash) == (6, Fault.DIE_AFTER)
    assert [info.step for info in found] == ([1, 2] if is_there else [1])


def test_checkpoints_live_on_any_filesystem(run_root, trainer):
    root = put_run("memory://checkpoints-of-a-test", run_of(run_root))
    model, optimizer = trainer()
    info = save(root, model, optimizer)
    other, other_optimizer = trainer(seed=1)
    load_checkpoint(root, info, other, other_optimizer)
    assert torch.equal(whole(other.model.norm.weight), whole(model.model.norm.weight))


def test_another_trainer_with_this_attempt_is_an_error(run_root, trainer):
    model, optimizer = trainer()
    save(run_root, model, optimizer, policy_version=1)
    with pytest.raises(NameTakenError, match=r"attempt=0/step=1 exists with other content"):
        save(run_root, model, optimizer, policy_version=2)


def edit(root, info, file, change):
    """As if it had been written so by a ludic that wrote no digests."""
    root.delete(f"{folder_of(info)}/digests.json")
    path = f"{root.path}/{folder_of(info)}/{file}"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


MOMENT = "state.model.norm.weight.exp_avg"
WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("optimizer.safetensors", lambda t: t.pop(MOMENT), rf"optimizer\.safetensors: {MOMENT} is missing"),
        ("optimizer.safetensors", lambda t: t.update({MOMENT: torch.zeros(3)}), rf"{MOMENT} is \(3,\).*\(64,\)"),
        ("optimizer.safetensors", lambda t: t.update(extra=torch.zeros(3)), r"extra is \(3,\), the model's is missing"),
        ("model.safetensors", lambda t: t.pop(WEIGHT), rf"the weights lack {WEIGHT}"),
        ("model.safetensors", lambda t: t.update(extra=torch.zeros(3)), r"the weights hold extra"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_and_nothing_is_changed(run_root, trainer, file, change, message):
    info = save(run_root, *trainer())
    edit(run_root, info, file, change)
    model, optimizer = trainer(seed=1)
    before, before_moments = full_state_dict(model), [m.clone() for m in moments(optimizer)]
    with pytest.raises(ModelError, match=message):
        load_checkpoint(run_root, info, model, optimizer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in full_state_dict(model).items())
    assert all(torch.equal(a, b) for a, b in zip(moments(optimizer), before_moments, strict=True))


def test_a_checkpoint_of_another_model_is_refused(run_root, trainer):
    info = save(run_root, *trainer(hidden_size=32))
    with pytest.raises(ModelError, match=r"model\.safetensors: .* is \(.*32.*\), the model's is \(.*64.*\)"):
        load_checkpoint(run_root, info, *trainer())


@pytest.mark.parametrize("file", ["optimizer.safetensors", "random.safetensors", "model.safetensors", "config.json"])
def test_a_damaged_checkpoint_is_named_by_its_path_in_the_root_and_passed_over(run_root, trainer, caplog, file):
    model, optimizer = trainer()
    attempt = start_attempt(run_root)
    older, newer = (save(run_root, model, optimizer, attempt_id=1, step=step) for step in (1, 2))
    assert checkpoint_to_resume(run_root, attempt) == newer
    name = f"{folder_of(newer)}/{file}"
    run_root.put(name, run_root.read(name)[:-9])
    with pytest.raises(SchemaError, match=f"^{run_root.url}/{name} does not match its digest in digests.json"):
        load_checkpoint(run_root, newer, model, optimizer)
    assert checkpoint_to_resume(run_root, attempt) == older
    assert f"{run_root.url}/{name} does not match" in caplog.text


def test_a_checkpoint_that_is_pruned_while_it_is_looked_at_is_passed_over(run_root, trainer, monkeypatch):
    model, optimizer = trainer()
    attempt = start_attempt(run_root)
    older, newer = (save(run_root, model, optimizer, attempt_id=1, step=step) for step in (1, 2))
    open_file = Storage.open_file

    def open_after_it_is_gone(storage, name):
        if name.startswith(folder_of(newer)):
            run_root.delete(folder_of(newer))
        return open_file(storage, name)

    monkeypatch.setattr(Storage, "open_file", open_after_it_is_gone)
    assert checkpoint_to_resume(run_root, attempt) == older


def test_a_checkpoint_is_read_once_whether_it_was_sound_or_not(run_root, trainer):
    model, optimizer = trainer()
    attempt = start_attempt(run_root)
    older, newer = (save(run_root, model, optimizer, attempt_id=1, step=step) for step in (1, 2))
    file = f"{folder_of(newer)}/optimizer.safetensors"
    whole, verdicts = run_root.read(file), {}
    run_root.put(file, b"damaged")
    assert checkpoint_to_resume(run_root, attempt, verdicts) == older
    run_root.put(file, whole)
    run_root.put(f"{folder_of(older)}/optimizer.safetensors", b"damaged")
    assert checkpoint_to_resume(run_root, attempt, verdicts) == older
    assert verdicts == {folder_of(older): True, folder_of(newer): False}
    assert checkpoint_to_resume(run_root, attempt) == newer


@pytest.mark.parametrize("file", ["optimizer.safetensors", "random.safetensors", "config.json"])
def test_a_truncated_file_of_a_checkpoint_without_digests_is_named(run_root, trainer, file):
    model, optimizer = trainer()
    info = save(run_root, model, optimizer)
    name = f"{folder_of(info)}/{file}"
    run_root.delete(f"{folder_of(info)}/digests.json")
    run_root.put(name, run_root.read(name)[:50])
    with pytest.raises(ModelError, match=folder_of(info)):
        load_checkpoint(run_root, info, model, optimizer)


def test_a_marker_of_something_else_is_named(run_root):
    run_root.put("checkpoints/attempt=0/step=1/checkpoint.json", b'{"format_version": 9}')
    with pytest.raises(SchemaError, match=r"step=1/checkpoint\.json is not a checkpoint\.json that ludic can read"):
        complete_checkpoints(run_root)


def test_a_newer_format_is_refused_by_number(run_root, trainer):
    info = save(run_root, *trainer())
    name = f"{folder_of(info)}/checkpoint.json"
    run_root.put(name, json.dumps(json.loads(run_root.read(name)) | {"format_version": 3}).encode())
    with pytest.raises(SchemaError, match="has format 3, this ludic reads 1 to 2"):
        complete_checkpoints(run_root)


def test_a_checkpoint_of_format_1_is_read(run_root, trainer):
    info = save(run_root, *trainer())
    name = f"{folder_of(info)}/checkpoint.json"
    older = {"cursor": {"files": {"w0": [[0, 4]]}, "groups": []}, "format_version": 1}
    run_root.put(name, json.dumps(json.loads(run_root.read(name)) | older).encode())
    (found,) = complete_checkpoints(run_root)
    assert Cursor.from_dict(dict(found.cursor)).has_source("w0", 3)
