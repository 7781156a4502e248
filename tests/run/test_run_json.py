"""The settings of a run in run.json, and what other versions of ludic make of them."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from ludic.errors import ConfigError
from ludic.root.root import Root
from ludic.run.config import RunConfig
from ludic.run.run_json import from_json, put_run, run_of, to_json
from ludic.settings.table import names_of

COLUMNS = {"x_judge": "string", "x_spans": "list<int64>"}


def edited(config: RunConfig, **changes) -> bytes:
    """Its run.json with these values changed."""
    return json.dumps(json.loads(to_json(config, "an-id")) | changes).encode()


def test_a_runs_own_columns_are_kept_in_their_order(root_url, run_config):
    root = put_run(root_url, replace(run_config, extra_columns=COLUMNS))
    assert list(Root.open(root_url).extra_columns.items()) == list(COLUMNS.items())
    assert root.extra_columns == COLUMNS
    with pytest.raises(ConfigError, match=r"extra_columns is \{'x_judge'.* there, \{\} was asked for"):
        put_run(root_url, run_config)


def test_columns_that_can_not_be_are_refused_when_a_run_is_configured(run_config):
    with pytest.raises(ConfigError, match="extra column 'x_a' is 'text', wanted one of string"):
        replace(run_config, extra_columns={"x_a": "text"})
    with pytest.raises(ConfigError, match="extra column 'judge': wanted x_"):
        replace(run_config, extra_columns={"judge": "string"})


def test_a_run_without_columns_of_its_own_is_one_that_ludic_of_schema_1_0_opens(run_config):
    assert "extra_columns" not in json.loads(to_json(run_config, "an-id"))


def test_a_run_of_an_older_minor_version_opens(run_config):
    assert from_json(edited(run_config, schema_version="1.0"), "run.json") == run_config


@pytest.mark.parametrize("version", ["v1.0", "v1.6"])
def test_a_run_that_does_not_say_what_identifies_an_example_keeps_question_and_answer(tmp_path, version):
    golden = Path(__file__).parents[1] / "golden" / version / "run.json"
    (tmp_path / "run.json").write_bytes(golden.read_bytes())
    assert Root.open(str(tmp_path)).example_ids == "question"


def test_a_new_run_says_what_identifies_an_example_and_is_asked_for_no_setting(root_url, run_config):
    root = put_run(root_url, run_config)
    assert json.loads(root.read("run.json"))["example_ids"] == root.example_ids == "row"
    root.put("run.json", edited(run_config, example_ids="question", run_id=root.run_id))
    assert put_run(root_url, run_config).example_ids == "question"  # the same settings, so it goes on
    root.put("run.json", edited(run_config, example_ids="mood"))
    with pytest.raises(
        ConfigError, match=rf"{root_url}/run\.json: example_ids is 'mood', wanted row or question; upgrade"
    ):
        Root.open(root_url)


def test_settings_that_a_newer_minor_version_added_are_left_out(run_config):
    assert from_json(edited(run_config, schema_version="1.99", mood="calm"), "run.json") == run_config
    with pytest.raises(ConfigError, match=r"run.json is not a run.json that ludic can read: .*'mood'"):
        from_json(edited(run_config, mood="calm"), "run.json")


@pytest.mark.parametrize(
    "wrong",
    [{"group_size": None}, {"group_size": [8]}, {"group_size": 8.5}, {"group_size": True}, {"env": "moar_cats"}],
)
def test_a_value_of_another_type_is_refused_by_name(run_config, wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=rf"run.json is not a run.json that ludic can read: .*{name}"):
        from_json(edited(run_config, **wrong), "run.json")


def test_a_float32_head_is_in_run_json_only_where_it_is_asked_for(run_config):
    assert "float32_head" not in json.loads(to_json(run_config, "an-id"))
    data = to_json(replace(run_config, float32_head=True), "an-id")
    assert from_json(data, "run.json").float32_head


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"extra_columns": COLUMNS, "float32_head": True, "keep_experts": True, "longrope": "long"},
        {"keep_sampling_mask": False, "sweep": {"temperature": [0.7, 1.0]}, "tools": ("calculator",)},
        {"env_options": {"moar_cats": {"size": 3, "words": ("a", "b"), "odds": None}}},
    ],
)
def test_settings_that_are_read_and_put_again_are_the_same_bytes(tmp_path, run_config, changes):
    root = put_run(str(tmp_path / "run"), replace(run_config, **changes))
    other = put_run(str(tmp_path / "other"), run_of(Root.open(root.url)), run_id=root.run_id)
    assert other.read("run.json") == root.read("run.json") == root.run_json


def test_run_json_says_what_is_the_roots_first_and_leaves_out_what_is_off(run_config):
    off = {"extra_columns", "float32_head", "keep_sampling_mask", "keep_experts", "longrope", "max_column_characters"}
    off |= {*names_of(RunConfig, "of_program")}
    settings = [field.name for field in fields(RunConfig) if field.name not in off]
    wanted = ["run_id", "schema_version", "example_ids", *settings, "digest"]
    assert list(json.loads(to_json(run_config, "an-id"))) == wanted
