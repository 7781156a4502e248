import pytest

from ludic.errors import ConfigError
from ludic.sql.library import load_advantage, load_filter
from ludic.training.config import TrainConfig
from ludic.training.losses import OBJECTIVES
from ludic.training.presets import DIALS, algorithm_names, load_algorithm


@pytest.mark.parametrize("name", algorithm_names())
def test_each_algorithm_names_what_is_there(name):
    values = load_algorithm(name)
    assert set(values) == set(DIALS)
    extra = {"constant_tokens": 32} if values["loss_normalization"] == "constant" else {}
    extra |= {"reference": "base"} if values["objective"] in ("dpo", "ipo") or values["kl_weight"] else {}
    config = TrainConfig.of(**values | extra)
    assert config.loss.objective.name in OBJECTIVES
    load_advantage(config.batch.advantage)
    for filter_name in config.batch.filters:
        load_filter(filter_name)


def test_dapo_is_what_its_paper_says():
    # clip-higher (0.2, 0.28), dynamic sampling, token-level loss
    dapo = load_algorithm("dapo")
    assert (dapo["clip_low"], dapo["clip_high"], dapo["loss_normalization"]) == (0.2, 0.28, "tokens")
    assert dapo["filters"] == ["drop_zero_variance_groups"]


def test_an_unknown_algorithm_is_an_error_that_names_a_close_one():
    with pytest.raises(ConfigError, match=r"algorithm 'grop' is unknown; did you mean .*grpo"):
        load_algorithm("grop")
