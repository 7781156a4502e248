import sys

import pytest

from ludic.errors import ConfigError
from ludic.training.ownership import open_log


def test_tensorboard_holds_each_metric_at_its_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_log("tensorboard", folder=str(tmp_path), run_id="r", settings={"learning_rate": 0.1}) as log:
        log(1, {"loss": 0.5})
        log(2, {"loss": 0.25})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 0.5), (2, 0.25)]


def test_none_takes_metrics_and_writes_nothing(tmp_path):
    with open_log("none", folder=str(tmp_path), run_id="r", settings={}) as log:
        log(1, {"loss": 0.5})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("log_to", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_library_that_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch, log_to, module):
    monkeypatch.setitem(sys.modules, module, None)  # what import finds when there is none
    with pytest.raises(ConfigError, match=rf"log_to is {log_to}.*ludic-rl\[telemetry\]"):
        with open_log(log_to, folder=str(tmp_path), run_id="r", settings={}):
            pass
