import time

import pytest
import torch

from ludic.training.step import StepTimer


def test_a_phase_that_is_entered_again_adds_up_and_may_hold_others():
    timer = StepTimer(torch.device("cpu"))
    with timer.host("step"):
        for _ in range(2):
            with timer.device("forward"):
                time.sleep(0.02)
        with timer.device("backward"):
            time.sleep(0.01)
    seconds = timer.seconds()
    assert list(seconds) == ["forward", "backward", "step"]
    assert seconds["forward"] >= 0.04
    assert seconds["backward"] >= 0.01
    assert seconds["step"] >= seconds["forward"] + seconds["backward"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_a_phase_lasts_as_long_as_its_kernels_and_holds_nobody_up():
    timer, matrix = StepTimer(torch.device("cuda")), torch.randn(8192, 8192, device="cuda")
    for _ in range(2):  # the first one also loads libraries
        with timer.host("step"):
            asked_since = time.perf_counter()
            with timer.device("forward"):
                for _ in range(20):
                    matrix @ matrix
            asked_s = time.perf_counter() - asked_since
    seconds = timer.seconds()
    # 20 products of 1.1 TFLOPs take longer than it takes to ask for them.
    assert seconds["forward"] > asked_s
    assert seconds["step"] >= seconds["forward"] * 0.99
