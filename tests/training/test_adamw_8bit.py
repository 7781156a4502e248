"""AdamW with moments in 8 bits, beside AdamW: losses, checkpoints, two ranks. `make 8bit` runs it with torchao."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ludic.errors import ConfigError
from ludic.root.root import Root
from ludic.training.adamw_8bit import adamw_8bit, from_file, is_quantized, split_moments, to_file

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
with_torchao = pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is in an environment of its own; see `make 8bit`")
SCRIPT = Path(__file__).with_name("adamw_8bit_on_ranks.py")
TOLERANCE = 0.05
"""Largest difference of a loss, in nats a token, at any of 40 steps in which the loss falls from 4.1."""


@pytest.mark.skipif(HAS_TORCHAO, reason="torchao is installed")
def test_without_torchao_the_error_says_what_to_install():
    with pytest.raises(ConfigError, match=r"adamw_8bit.*pip install 'ludic-rl\[8bit\]'"):
        adamw_8bit([{"params": [nn.Parameter(torch.zeros(2, 2))]}], lr=1e-3, betas=(0.9, 0.999))


@pytest.mark.parametrize(
    ("shape", "quantized"),
    [((64, 64), True), ((63, 64), False), ((65, 64), False), ((68, 64), True), ((4096,), True), ((), False)],
    ids=["4,096 numbers are 16 blocks", "4,032", "16 blocks and a quarter", "17 blocks", "a vector", "a scalar"],
)
def test_a_large_weight_of_whole_blocks_has_moments_in_8_bits(shape, quantized):
    assert is_quantized(torch.zeros(shape)) == quantized


@with_torchao
def test_moments_go_into_a_file_and_back_in_either_form():
    from torchao.optim.subclass_8bit import OptimState8bit

    torch.manual_seed(0)
    exact = torch.randn(32, 256)
    quantized = OptimState8bit.zeros((32, 256), signed=True, block_size=256)
    quantized.copy_(exact)
    split = split_moments({"state.w.exp_avg": quantized, "state.w.step": torch.tensor(3.0)})
    stored = to_file(split)
    # 32 rows of 256 numbers: 32 blocks, each with a scale of 4 bytes beside its 256 codes.
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()} == {
        "state.w.exp_avg.codes": (torch.uint8, (32, 256)),
        "state.w.exp_avg.scale": (torch.float32, (32,)),
        "state.w.step": (torch.float32, ()),
    }
    again = from_file(dict(stored), split)
    assert all(torch.equal(again[name], split[name]) for name in split)
    whole = from_file(dict(stored), ["state.w.exp_avg", "state.w.step"])
    assert torch.equal(whole["state.w.exp_avg"], quantized.dequantize())
    assert (whole["state.w.exp_avg"] - exact).abs().max() < 0.05 * exact.abs().max()
    from_float = from_file({"state.w.exp_avg": exact, "state.w.step": torch.tensor(3.0)}, split)
    assert torch.equal(from_float["state.w.exp_avg.codes"], split["state.w.exp_avg.codes"])


@pytest.fixture(scope="module", params=[1, 2])
def trained(request, tmp_path_factory):
    """What each rank saw, and the root, of a run on one and on two ranks."""
    folder = tmp_path_factory.mktemp(f"{request.param}-ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(request.param)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command += [str(SCRIPT), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return Root.open(str(folder / "run")), [
        json.loads((folder / f"rank={rank}.json").read_text()) for rank in range(request.param)
    ]


@with_torchao
@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_losses_stay_beside_those_of_adamw(trained):
    for seen in trained[1]:
        assert seen["adamw"][0] > 4
        assert seen["adamw"][-1] < 0.8 * seen["adamw"][0]  # it learns
        assert seen["adamw_8bit"] == pytest.approx(seen["adamw"], abs=TOLERANCE)


@with_torchao
@pytest.mark.slow
def test_a_resume_repeats_every_bit(trained):
    root, ranks = trained
    for seen in ranks:
        assert seen["resumed"] == seen["unbroken"][3:]
    for file in ("model.safetensors", "optimizer.safetensors"):
        unbroken, resumed = (load_file(f"{root.path}/checkpoints/attempt={n}/step=5/{file}") for n in (1, 2))
        assert unbroken.keys() == resumed.keys()
        assert all(torch.equal(unbroken[name], resumed[name]) for name in unbroken)
    assert any(name.endswith(".codes") for name in unbroken)
