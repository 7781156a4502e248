import json

import pytest

from ludic.errors import ConfigError
from ludic.root.sql.library import load_advantage, load_filter
from ludic.settings.kinds import ALGORITHM, OBJECTIVE
from ludic.training.config import TrainConfig
from ludic.training.presets import DIALS, load_algorithm, nearest_algorithm


@pytest.mark.parametrize("name", ALGORITHM.names())
def test_each_algorithm_names_what_is_there(name):
    values = load_algorithm(name)
    assert set(values) == set(DIALS)
    extra = {"constant_tokens": 32} if values["loss_normalization"] == "constant" else {}
    extra |= {"reference": "base"} if values["objective"] in ("dpo", "ipo") or values["kl_weight"] else {}
    config = TrainConfig.of(**values | extra)
    assert config.loss.objective.name in OBJECTIVE.names()
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


@pytest.mark.parametrize("name", ALGORITHM.names())
def test_stored_settings_tell_their_algorithm(name):
    values = load_algorithm(name)
    extra = {"constant_tokens": 32} if values["loss_normalization"] == "constant" else {}
    extra |= {"reference": "base"} if values["objective"] in ("dpo", "ipo") or values["kl_weight"] else {}
    stored = json.loads(json.dumps(TrainConfig.of(**values | extra).flat()))
    found, changed = nearest_algorithm(stored)
    given = {"constant_tokens"} & extra.keys()
    # two algorithms with the same settings are one; a user's own number is no part of an algorithm
    assert load_algorithm(found) == values
    assert set(changed) == given


def test_the_nearest_algorithm_comes_with_what_differs():
    stored = TrainConfig.of(**load_algorithm("grpo") | {"clip_high": 0.3, "filters": ("drop_truncated",)}).flat()
    assert nearest_algorithm(stored) == ("grpo", {"clip_high": 0.3, "filters": ("drop_truncated",)})


@pytest.mark.parametrize("stored", [{}, {"advantage": "mine.sql", "objective": "reinforce"}])
def test_an_advantage_of_ones_own_is_of_no_algorithm(stored):
    assert nearest_algorithm(stored) is None
