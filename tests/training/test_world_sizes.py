"""World sizes of 1, 2 and 4: one plan gives the same steps, and a checkpoint fits them all."""

from pathlib import Path

import pytest
import torch
from forks import run_ranks
from safetensors.torch import load_file

from ludic.settings.kinds import OBJECTIVE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("objectives_on_ranks.py")


def relative_error(found, expected):
    """Of all numbers together: L2 norm of the difference over that of what was expected."""
    difference = sum((found[name] - expected[name]).double().square().sum() for name in expected)
    return (difference / sum(tensor.double().square().sum() for tensor in expected.values())).sqrt().item()


def part(tensors, prefix):
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def cases(tensors):
    """Names such as gspo/sequences/float64."""
    return sorted({name.removesuffix("/losses") for name in tensors if name.endswith("/losses")})


def of(tensors):
    """Cases whatever their dtype."""
    return {name.partition("/")[0] for name in cases(tensors)}


def assert_agrees(found, expected):
    assert found.keys() == expected.keys()
    for case in cases(expected):
        limit = 1e-9 if case.endswith("float64") else 1e-5
        assert relative_error(part(found, f"{case}/gradients"), part(expected, f"{case}/gradients")) < limit, case
        losses = found[f"{case}/losses"], expected[f"{case}/losses"]
        torch.testing.assert_close(*losses, rtol=limit, atol=1e-2 * limit, msg=case)
        if case.endswith("float64"):
            for name, tensor in part(found, f"{case}/weights").items():
                torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-8, msg=name)


def files_of(root, attempt_id):
    folder = Path(root.path) / f"checkpoints/attempt={attempt_id}/step=3"
    return {name: load_file(folder / f"{name}.safetensors") for name in ("model", "optimizer")}


def test_objectives_train_alike_on_1_2_and_4_ranks_and_a_checkpoint_moves_between_them(tmp_path, run_root, train_here):
    train_here(run_root.url, attempt_id=1, steps=range(1, 4))
    # Each reads the checkpoint of the one before. On 4 ranks, which cost most, every third case.
    for attempt_id, num_ranks, every in ((2, 2, 1), (3, 1, 1), (4, 4, 3)):
        words = [SCRIPT, tmp_path / str(num_ranks), run_root.url, attempt_id - 1, attempt_id, every]
        run_ranks(num_ranks, words, tmp_path / f"logs-{num_ranks}")

    one, two, four = (load_file(tmp_path / str(num_ranks)) for num_ranks in (1, 2, 4))
    assert_agrees(two, one)
    assert_agrees(four, {name: tensor for name, tensor in one.items() if name.partition("/")[0] in of(four)})
    assert len(of(four)) >= len(of(one)) / 3
    # Else one thing was compared many times.
    assert (
        len({tuple(one[f"{case}/losses"].tolist()) for case in cases(one)})
        == len(cases(one))
        > len(of(one))
        == len(OBJECTIVE.names()) + 3
    )

    written = files_of(run_root, 1)
    assert written["optimizer"]["state.model.norm.weight.exp_avg_sq"].abs().max() > 0
    for attempt_id in (2, 3, 4):
        for name, tensors in files_of(run_root, attempt_id).items():
            assert tensors.keys() == written[name].keys()
            assert all(torch.equal(tensors[key], tensor) for key, tensor in written[name].items()), name
    # and one rank again goes on as if it had never been elsewhere
    steps = range(4, 6)
    resumed, straight = (
        train_here(run_root.url, attempt_id=new, steps=steps, resume_from=(old, 3)) for new, old in ((5, 4), (6, 1))
    )
    assert resumed == straight
