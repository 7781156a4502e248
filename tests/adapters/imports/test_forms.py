"""Every form of conversations and pairs, in every container, gives the tokens of a plain list of messages.

forms/ has a file for each: rows as people have them, what they are as plain messages, and rows that are refused. The
table in docs/fit.md is made of the same files.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from chat_models import chat_tokenizer
from containers import ENCODERS, arrow_stream, write_rows
from hypothesis import given
from hypothesis import strategies as st

import ludic
from ludic.adapters.imports.formats import load_format
from ludic.adapters.imports.forms import _ROLES, CONVERSATIONS, PAIRS, Read, conversations, form_of, import_form, pairs
from ludic.adapters.imports.importing import import_file
from ludic.app.cli.docs import FORMS, forms_table, read_forms
from ludic.app.operations.fit_inputs import Inputs, read_rows
from ludic.app.operations.outcomes import Imported
from ludic.base.data_files import SUFFIXES
from ludic.errors import ConfigError, RefusedRecordError
from ludic.models.tiny import TOOL_TEMPLATE
from ludic.records.conversion import from_table
from ludic.records.messages import read_messages
from ludic.records.rollout import Rollout, new_id
from ludic.records.tables import arrow_schema
from ludic.root.json_records import ImportReport
from ludic.root.rows.files import list_files
from ludic.root.rows.parquet import read_columns
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

HERE = Path(__file__).parents[3]
FIXTURES = read_forms(HERE)
by_name = pytest.mark.parametrize("name", FIXTURES)
Tokens = tuple[list[int], list[int], list[bool] | None, float | None]


def read(name: str, rows: Sequence[Mapping[str, Any]], where: str = "x") -> Read:
    return (conversations if FIXTURES[name]["use"] == "conversations" else pairs)(rows, where)


def plain(name: str) -> Iterator[dict[str, Any]]:
    """Records of the format jsonl, from nothing but the fixture's messages."""
    for number, row in enumerate(FIXTURES[name]["same"]):
        shared = {"group_id": number} | {key: row[key] for key in ("tools",) if key in row}
        if "messages" in row:
            yield {"messages": row["messages"], "episode_reward": 1.0, **shared}
            continue
        for side, reward in (("chosen", 1.0), ("rejected", 0.0)):
            asked = [{**each, "trainable": False} for each in row["prompt"]]
            said = [{**each, "trainable": each["role"] == "assistant"} for each in row[side]]
            yield {"messages": [*asked, *said], "episode_reward": reward, **shared}


def bring_in(path: Path | str, name: str = "jsonl") -> tuple[list[Rollout], ImportReport]:
    root, tokenizer = put_run(f"memory://{new_id()}", RunConfig(model="none", env=("cats",))), chat_tokenizer()
    before, tokenizer.chat_template = tokenizer.chat_template, TOOL_TEMPLATE
    try:
        how = {"env_name": "cats", "tokenizer": "none", "get_tokenizer": lambda: tokenizer}
        report = import_file(root, str(path), load_format(name), **how)
    finally:
        tokenizer.chat_template = before
    names = arrow_schema("rollouts").names
    batches = [from_table(read_columns(root, file.name, names)) for file in list_files(root)]
    rows = [row for batch in batches for one in batch for group in one.groups for row in group.rollouts]
    return sorted(rows, key=lambda row: (-row.request_index, row.segment_index)), report


def tokens(rollouts: Sequence[Rollout]) -> list[Tokens]:
    return [
        (
            row.prompt_tokens.tolist(),
            row.response_tokens.tolist(),
            None if row.action_mask is None else row.action_mask.tolist(),
            row.episode_reward,
        )
        for row in rollouts
    ]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Tokens]]:
    folder = tmp_path_factory.mktemp("plain")
    return {name: tokens(bring_in(write_rows(folder / f"{name}.jsonl", [*plain(name)]))[0]) for name in FIXTURES}


def test_every_form_has_a_fixture_and_every_suffix_a_writer() -> None:
    assert {form["form"] for form in FIXTURES.values()} == {form.name for form in (*CONVERSATIONS, *PAIRS)}
    assert [*ENCODERS] == [*SUFFIXES]
    assert (HERE / FORMS).samefile(Path(__file__).with_name("forms"))


@pytest.mark.parametrize("suffix", SUFFIXES)
@by_name
def test_every_form_in_every_container_gives_the_tokens_of_plain_messages(
    name: str, suffix: str, tmp_path: Path, wanted: Mapping[str, list[Tokens]]
) -> None:
    path = write_rows(tmp_path / f"rows{suffix}", FIXTURES[name]["rows"])
    rows, where = read_rows(str(path), {})
    found = read(name, rows, where)
    assert found.said == f"{path}: {FIXTURES[name]['said']}"
    records = Inputs.of(str(tmp_path / "run")).put_rows(found.records, where)
    assert tokens(bring_in(records)[0]) == wanted[name]
    assert any(any(response) for _, response, _, _ in wanted[name])


@by_name
def test_values_of_python_are_read_as_files_are(name: str) -> None:
    assert read(name, FIXTURES[name]["rows"]).said == f"x: {FIXTURES[name]['said']}"


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
@by_name
def test_ludic_import_reads_every_form_too(
    name: str, suffix: str, tmp_path: Path, wanted: Mapping[str, list[Tokens]]
) -> None:
    rollouts, report = bring_in(write_rows(tmp_path / f"rows{suffix}", FIXTURES[name]["rows"]))
    assert [row[:3] for row in tokens(rollouts)] == [row[:3] for row in wanted[name]]
    if FIXTURES[name]["use"] == "pairs":
        assert [row.episode_reward for row in rollouts] == [1.0, 0.0] * (len(rollouts) // 2)
        assert {row.group_size for row in rollouts} == {2}
    (said,) = Imported(root="r", files=[report]).parts()
    form = FIXTURES[name]["form"]
    assert (f"read as {form}" in said) == (form not in ("messages", "prompt and completion"))


def test_rows_of_messages_with_and_without_a_system_column_are_one_form(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [{"messages": messages}, {"messages": messages, "system": "s"}, {"conversation": messages}]
    rows += [{"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": messages[1:]}]
    rollouts, report = bring_in(write_rows(tmp_path / "rows.jsonl", rows))
    assert report.refused == []
    assert [row.messages[0].content for row in rollouts] == ["q", "s", "q", "q", "q"]


def test_a_packed_file_may_be_at_a_url(wanted: Mapping[str, list[Tokens]]) -> None:
    url = f"memory://{new_id()}/rows.jsonl.gz"
    with fsspec.open(url, "wb") as file:
        file.write(ENCODERS[".jsonl.gz"](FIXTURES["sharegpt"]["rows"]))
    assert [row[:3] for row in tokens(bring_in(url)[0])] == [row[:3] for row in wanted["sharegpt"]]


def test_results_of_verifiers_keep_their_rewards(tmp_path: Path) -> None:
    rollouts, report = bring_in(write_rows(tmp_path / "results.jsonl", FIXTURES["verifiers"]["rows"]))
    assert [(row.episode_reward, row.reward_components, row.wanted) for row in rollouts] == [
        (1.0, {"right": 1.0}, "rain"),
        (0.0, {"right": 0.0}, "4"),
    ]
    assert [(row.env_name, row.env_example_id) for row in rollouts] == [("weather", "0"), ("weather", "1")]
    assert [(refusal.line, refusal.reason) for refusal in report.refused] == [(3, "without a completion")]
    assert report.kept_as_metadata == {"info": 2}


# --- Pairs -----------------------------------------------------------------------------------------------------------

SYSTEM, ASKED = {"role": "system", "content": "s"}, [{"role": "user", "content": "q"}]
BEFORE = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "o"}, *ASKED]
GOOD, POOR = ([{"role": "assistant", "content": text}] for text in ("good", "poor"))
WHOLE = [SYSTEM, *BEFORE]
WAYS: list[tuple[Any, list[dict[str, Any]], list[dict[str, Any]]]] = [
    # prompt, beginning of both answers, the prompt that it is
    (None, WHOLE, WHOLE),
    (None, BEFORE, BEFORE),
    (WHOLE, WHOLE, WHOLE),
    (WHOLE, BEFORE, WHOLE),
    (WHOLE, [], WHOLE),
    (BEFORE, WHOLE, WHOLE),
    (BEFORE, BEFORE, BEFORE),
    (BEFORE, [], BEFORE),
    *((question, WHOLE, WHOLE) for question in ("q", "\n q ", ASKED)),
    *((question, BEFORE, BEFORE) for question in ("q", "\n q ", ASKED)),
    *((question, [], ASKED) for question in ("q", ASKED)),
]


def check_pair(row: Mapping[str, Any], wanted: list[dict[str, Any]]) -> None:
    for record, answer in zip(pairs([row], "x").records, (GOOD, POOR), strict=True):
        found = [(each["role"], each["content"], each["trainable"]) for each in record["messages"]]
        asked = [(each["role"], each["content"], False) for each in wanted]
        assert found == [*asked, ("assistant", answer[0]["content"], True)]


@pytest.mark.parametrize(("prompt", "begun", "wanted"), WAYS, ids=range(len(WAYS)))
def test_a_prompt_may_be_given_in_many_ways_and_the_question_stands_once(
    prompt: Any, begun: list[dict[str, Any]], wanted: list[dict[str, Any]]
) -> None:
    check_pair({"prompt": prompt, "chosen": [*begun, *GOOD], "rejected": [*begun, *POOR]}, wanted)
    completion = [*begun, *GOOD] if begun else "good"
    if prompt is not None:
        (record,) = conversations([{"prompt": prompt, "completion": completion}], "x").records
        assert [each["content"] for each in record["messages"]] == [each["content"] for each in [*wanted, *GOOD]]
        assert [each["trainable"] for each in record["messages"]] == [False] * len(wanted) + [True]


@pytest.mark.parametrize("chosen", [WHOLE, BEFORE, []])
@pytest.mark.parametrize("rejected", [WHOLE, BEFORE, []])
def test_with_the_whole_prompt_each_answer_may_repeat_it_or_not(
    chosen: list[dict[str, Any]], rejected: list[dict[str, Any]]
) -> None:
    check_pair({"prompt": WHOLE, "chosen": [*chosen, *GOOD], "rejected": [*rejected, *POOR]}, WHOLE)


turns = st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=4)


@given(shared=turns, good=turns, poor=turns)
def test_the_prompt_is_the_longest_common_beginning_as_trl_finds_it(
    shared: list[str], good: list[str], poor: list[str]
) -> None:
    def conversation(texts: Sequence[str]) -> list[dict[str, str]]:
        return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]

    sides = [conversation([*shared, *own]) for own in (good, poor)]
    sides = [side[: len(side) // 2 * 2] for side in sides]
    first = next((n for n, (one, other) in enumerate(zip(*sides, strict=False)) if one != other), None)
    same = min(map(len, sides)) - 1 if first is None else first
    row = {"chosen": sides[0], "rejected": sides[1]}
    if sides[0] == sides[1] or not same or same % 2 == 0:  # equal, nothing shared, or different questions
        with pytest.raises(ConfigError):
            pairs([row], "x")
        return
    for record, side in zip(pairs([row], "x").records, sides, strict=True):
        assert [each["content"] for each in record["messages"]] == [each["content"] for each in side]
        assert [each["trainable"] for each in record["messages"]] == [
            n >= same and each["role"] == "assistant" for n, each in enumerate(side)
        ]


REFUSED = [
    pytest.param(name, number, id=f"{name}-{each['why']}")
    for name, form in FIXTURES.items()
    for number, each in enumerate(form["refused"])
]


@pytest.mark.parametrize(("name", "number"), REFUSED)
def test_what_the_documents_say_is_refused_is_refused_with_its_row(name: str, number: int) -> None:
    form = FIXTURES[name]
    each = form["refused"][number]
    with pytest.raises(ConfigError) as error:
        read(name, [form["rows"][0], each["row"]])
    assert str(error.value).startswith("x, row 1 ")
    assert each["said"] in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_has_one_form_and_one_that_fits_none_is_refused_with_its_fields(tmp_path: Path) -> None:
    rows = [FIXTURES["sharegpt"]["rows"][0], FIXTURES["alpaca"]["rows"][0]]
    with pytest.raises(
        ConfigError, match="row 1 has the form Alpaca, and the rows before it have ShareGPT; wanted one"
    ):
        conversations(rows, "x")
    _, report = bring_in(write_rows(tmp_path / "mixed.jsonl", rows))
    assert report.refused[0].reason == "is Alpaca, and the records before it are ShareGPT"
    with pytest.raises(ConfigError, match=r"x, row 0 fits no form; its fields are question, answer; the forms"):
        conversations([{"question": "a", "answer": "b", "empty": None}], "x")


def test_an_image_that_the_text_does_not_show_is_a_column_like_others() -> None:
    row = {"messages": [{"role": "user", "content": "fix it"}, {"role": "assistant", "content": "done"}]}
    said = conversations([{**row, "image": "docker.io/library/python:3.11", "images": []}], "x").said
    assert said == "x: read as messages: 1 conversation; columns that are not read: image, images"
    shown = {"conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]}
    with pytest.raises(ConfigError, match="x, row 0 has image, and ludic reads texts alone"):
        conversations([{**shown, "image": "coco/1.jpg"}], "x")


def test_every_row_of_a_fixture_fits_one_form() -> None:
    for name, form in FIXTURES.items():
        forms = CONVERSATIONS if form["use"] == "conversations" else PAIRS
        assert {form_of(row, forms).name for row in form["rows"]} == {form["form"]}, name


def test_marks_of_a_message_hold_after_a_prompt_too() -> None:
    answer = [{"role": "assistant", "content": "a", "weight": 0}, {"role": "user", "content": "b"}]
    row = {"prompt": "q", "completion": [*answer, {"role": "assistant", "content": "c"}]}
    (record,) = conversations([row], "x").records
    assert [each["trainable"] for each in record["messages"]] == [False, False, False, True]


def test_pairs_that_leave_nothing_are_refused_with_their_counts() -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "b"}]
    with pytest.raises(ConfigError, match="x: read as preference pairs: 0 pairs; left out: 1 whose chosen equals rej"):
        pairs(rows, "x")


def test_records_of_forms_that_older_runs_hold_have_the_same_bytes(tmp_path: Path) -> None:
    """A run goes on only with the rows that it began with, which are named by the digest of these lines."""
    messages = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "a"}]
    inputs = Inputs.of(str(tmp_path))
    begun = '{"messages":[{"role":"user","content":"q","trainable":false},{"role":"assistant","content":'
    wanted = {
        '{"messages":[{"role":"user","content":"é"},{"role":"assistant","content":"a"}],"group_id":"0",'
        '"episode_reward":1.0,"tools":[]}\n': conversations([{"messages": messages, "tools": []}], "x"),
        f'{begun}"a","trainable":true}}],"group_id":"0","episode_reward":1.0}}\n': conversations(
            [{"prompt": "q", "completion": "a"}], "x"
        ),
        f'{begun}"a","trainable":true}}],"group_id":"0","episode_reward":1.0}}\n'
        f'{begun}"b","trainable":true}}],"group_id":"0","episode_reward":0.0}}\n': pairs(
            [{"prompt": "q", "chosen": "a", "rejected": "b"}], "x"
        ),
    }
    for text, found in wanted.items():
        assert inputs.put_rows(found.records, "x").read_text(encoding="utf-8") == text


def test_the_page_names_what_the_forms_read() -> None:
    """The table is made of the fixtures; what the code reads must be in it."""
    table = forms_table(HERE)
    assert table in (HERE / "docs" / "fit.md").read_text(encoding="utf-8")
    for form in (*CONVERSATIONS, *PAIRS):
        (line,) = (line for line in table.splitlines() if line.startswith(f"| {form.name} |"))
        own = set(form.fields.split("`")[1::2]) - {"role", "content", "from", "value"}
        assert own <= {*form.reads}, form.name
        read_by_all = {*form.reads} & {"is_truncated", "system", "history", "question", "messages", "conversation"}
        assert all(name in line or form.name.startswith("preference") for name in read_by_all), form.name
    (sharegpt,) = (line for line in table.splitlines() if line.startswith("| ShareGPT |"))
    assert all(f"`{role}`" in sharegpt for role in (*_ROLES, "function_call", "arguments", "parameters"))
    assert all(f"`{name}`" in table for name in ("tools", "functions", "tool_defs"))


def test_results_of_verifiers_are_named_where_traces_are_wanted(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "results.jsonl", FIXTURES["verifiers"]["rows"])
    with pytest.raises(ConfigError, match=r"has no trace of an agent .*; results\.jsonl of verifiers is read by"):
        bring_in(path, "prime-rl")


def test_an_arrow_stream_is_read_as_an_arrow_file(tmp_path: Path) -> None:
    path = tmp_path / "data.arrow"
    path.write_bytes(arrow_stream(FIXTURES["sharegpt"]["rows"]))
    assert read("sharegpt", *read_rows(str(path), {})).said == f"{path}: {FIXTURES['sharegpt']['said']}"


def test_what_was_read_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, model_folder: str
) -> None:
    monkeypatch.setattr("ludic.app.operations.start.train", lambda *args, **options: None)
    caplog.set_level(logging.INFO, "ludic")
    path = write_rows(tmp_path / "chats.json", [{"conversations": FIXTURES["sharegpt"]["rows"][0]["conversations"]}])
    ludic.sft(model=model_folder, dataset=path, root=tmp_path / "run")
    told = [record.message for record in caplog.records if "read as" in record.message]
    assert told == [f"{path}: read as ShareGPT: 1 conversation"]


# --- What is used, refused by name, or counted -----------------------------------------------------------------------

HUMAN = {"from": "human", "value": "q"}


def one(row: Mapping[str, Any]) -> Mapping[str, Any]:
    (record,) = conversations([row], "x").records
    return record


def refused(row: Mapping[str, Any], use: Any = conversations) -> str:
    with pytest.raises(ConfigError) as error:
        use([row], "x")
    return str(error.value)


def called(value: Mapping[str, Any]) -> Mapping[str, Any]:
    turn = {"from": "function_call", "value": json.dumps(value)}
    (call,) = one({"conversations": [HUMAN, turn]})["messages"][1]["tool_calls"]
    return call


@pytest.mark.parametrize("field", ["content", "role", "tool_calls"])
def test_a_turn_of_sharegpt_has_each_thing_once(field: str) -> None:
    side, value = ("function_call", '{"name": "f"}') if field == "tool_calls" else ("gpt", "a")
    said = refused({"conversations": [HUMAN, {"from": side, "value": value, field: "assistant"}]})
    assert f"x, row 0 a turn of conversations has {'from' if field == 'role' else 'value'} and {field}, wanted" in said


def test_a_call_of_sharegpt_keeps_its_arguments_its_id_and_its_other_fields() -> None:
    assert called({"name": "f", "parameters": {"a": 1}})["function"] == {"name": "f", "arguments": {"a": 1}}
    assert called({"name": "f", "id": "c1", "mood": "calm"}) == {
        "type": "function",
        "id": "c1",
        "mood": "calm",
        "function": {"name": "f", "arguments": None},
    }


def call(id_: str, arguments: Any) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": "f", "arguments": arguments}}


SPELLINGS = [
    ({"id": "1"}, {"id": "2"}),
    ({}, {"content": [{"type": "text", "text": "o"}]}),
    ({}, {"content": " o\n"}),
    ({"tool_calls": [call("a", {"n": 1, "m": 2})]}, {"tool_calls": [call("b", '{"m":2, "n":1}')]}),
]


@pytest.mark.parametrize(("one_way", "other_way"), SPELLINGS)
def test_a_shared_answer_is_shared_whatever_its_spelling(one_way: dict[str, Any], other_way: dict[str, Any]) -> None:
    asked, said = BEFORE[:1], {"role": "assistant", "content": "o"}
    ways = [{**said, **way} for way in (one_way, other_way)]
    chosen, rejected = ([*asked, way, *ASKED, *own] for way, own in zip(ways, (GOOD, POOR), strict=True))
    found = pairs([{"chosen": chosen, "rejected": rejected}], "x").records
    assert [[each["trainable"] for each in record["messages"]] for record in found] == [[False] * 3 + [True]] * 2
    equal = {"chosen": [*asked, ways[0]], "rejected": [*asked, ways[1]]}
    assert "left out: 1 whose chosen equals rejected" in refused(equal, pairs)
    users = [[{**ASKED[0], "id": name}, *own] for name, own in (("1", GOOD), ("2", POOR))]
    assert pairs([{"chosen": users[0], "rejected": users[1]}], "x").num_used == 1


def test_arguments_of_other_types_are_other_answers() -> None:
    sides = [[{"role": "assistant", "content": "", "tool_calls": [call("a", {"n": n})]}] for n in (1, True)]
    assert pairs([{"prompt": "q", "chosen": sides[0], "rejected": sides[1]}], "x").num_used == 1


def verifiers_row(**values: Any) -> dict[str, Any]:
    return {"prompt": ASKED, "completion": GOOD, "reward": 1.0, "example_id": 0, **values}


def test_a_truncated_result_of_verifiers_gets_no_end_of_turn(tmp_path: Path) -> None:
    cut = conversations([verifiers_row(is_truncated=True, stop_condition="prompt_too_long")], "x")
    assert cut.records[0]["finish_reason"] == "length"
    assert cut.said.endswith("columns that are not read: stop_condition")
    assert "finish_reason" not in one(verifiers_row(is_truncated=False))
    records = Inputs.of(str(tmp_path / "run")).put_rows(cut.records, "x")
    ours, _ = bring_in(records)
    theirs, _ = bring_in(write_rows(tmp_path / "rows.jsonl", [verifiers_row(is_truncated=True)]))
    assert tokens(ours) == tokens(theirs)
    whole, _ = bring_in(write_rows(tmp_path / "whole.jsonl", [verifiers_row()]))
    assert whole[0].response_tokens[:-1].tolist() == ours[0].response_tokens.tolist()


@pytest.mark.parametrize("label", [True, False, 0, 1, 0.0, 1.0, "0", "1", "True", "false"])
def test_a_label_of_good_and_bad_completions_is_refused_in_training_and_import(label: Any) -> None:
    row = {"prompt": "a", "completion": "b", "label": label}
    assert "x, row 0 has a label of good and bad completions" in refused(row)
    with pytest.raises(RefusedRecordError, match="has a label of good and bad completions"):
        import_form(row)


def test_another_label_is_named_as_not_read() -> None:
    said = conversations([{"prompt": "a", "completion": "b", "label": "news"}], "x").said
    assert said.endswith("columns that are not read: label")


def test_messages_may_be_json_text_in_every_field(tmp_path: Path) -> None:
    asked, good, poor = map(json.dumps, (BEFORE, GOOD, POOR))
    texts = conversations([{"prompt": asked, "completion": good}], "x").records
    assert texts == conversations([{"prompt": BEFORE, "completion": GOOD}], "x").records
    answers = pairs([{"prompt": asked, "chosen": good, "rejected": poor}], "x").records
    assert answers == pairs([{"prompt": BEFORE, "chosen": GOOD, "rejected": POOR}], "x").records
    _, _, (record,) = import_form({"prompt": asked, "completion": good})
    assert record["messages"] == texts[0]["messages"]


@pytest.mark.parametrize("text", ['[{"role": "CEO", "name": "Ann"}]', '[{"from": "Oslo", "to": "Rome"}]', "[1]", "{}"])
def test_an_answer_in_json_that_is_no_message_stays_a_text(text: str) -> None:
    assert one({"prompt": "a", "completion": text})["messages"][1]["content"] == text


def test_what_is_not_used_of_two_of_a_kind_is_named() -> None:
    row = {"prompt": "a", "chosen": "c", "rejected": "d"}
    assert "has prompt and question, wanted one" in refused({**row, "question": "b"}, pairs)
    assert pairs([{**row, "question": "a"}], "x").num_used == 1
    said = pairs([{**row, "score_chosen": 4, "score_rejected": "N/A"}, row], "x").said
    assert said.endswith("columns that are not read: score_chosen in 1 row, score_rejected in 1 row")


def test_an_import_renders_messages_and_a_text_as_training_does(tmp_path: Path) -> None:
    row = {"prompt": ASKED, "completion": "a", "tools": [{"name": "f", "parameters": {"type": "object"}}]}
    ours, _ = bring_in(Inputs.of(str(tmp_path / "run")).put_rows(conversations([row], "x").records, "x"))
    theirs, report = bring_in(write_rows(tmp_path / "rows.jsonl", [row]))
    assert [each[:3] for each in tokens(ours)] == [each[:3] for each in tokens(theirs)]
    assert report.kept_as_metadata == {}


def test_a_pair_beside_its_messages_is_a_pair_in_import_and_a_chat_in_sft() -> None:
    """As in UltraFeedback."""
    row = {"prompt": "q", "messages": [*ASKED, *GOOD], "chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *POOR]}
    name, _, records = import_form(row)
    assert (name, [each["episode_reward"] for each in records]) == ("preference pairs", [1.0, 0.0])
    assert conversations([row], "x").said.endswith("columns that are not read: prompt, chosen, rejected")
    with pytest.raises(RefusedRecordError, match="has messages besides chosen and rejected, and they are not the chos"):
        import_form({**row, "messages": [*ASKED, *POOR]})
    with pytest.raises(RefusedRecordError, match="has episode_reward besides chosen and rejected"):
        import_form({**row, "episode_reward": 0.5})


def test_rows_without_a_turn_to_train_on_are_left_out_and_counted() -> None:
    chat, unmarked = {"messages": [*ASKED, *GOOD]}, [{**GOOD[0], "weight": 0}]
    read = conversations([chat, {"messages": ASKED}, {"messages": [*ASKED, *unmarked]}], "x")
    assert read.said == "x: read as messages: 1 conversation; left out: 2 without a turn to train on"
    row = {"prompt": "q", "chosen": GOOD, "rejected": POOR}
    both = pairs([row, {**row, "chosen": unmarked}], "x")
    assert both.said.endswith("1 pair; left out: 1 with a side without a turn to train on")
    assert len(both.records) == 2


# --- Rows that are changed -------------------------------------------------------------------------------------------


def objects(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of the messages and turns in a row."""
    if isinstance(value, dict) and ("role" in value or "from" in value):
        yield path
    elif isinstance(value, list | dict) and path[:1] not in (("tools",), ("tool_defs",)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from objects(each, (*path, key))


def changed(value: Any, path: tuple[Any, ...], change: Any) -> Any:
    if not path:
        return change(value)
    copy = dict(value) if isinstance(value, dict) else [*value]
    copy[path[0]] = changed(value[path[0]], path[1:], change)
    return copy


def outcome(name: str, row: Mapping[str, Any]) -> tuple[list[Any], str, set[str]]:
    """What the messages of a row say and whether they are trained on, the refusal, and the fields that are counted."""
    try:
        found = read(name, [row]).records
    except ConfigError as error:
        return [], str(error), set()
    reads = [read_messages(record["messages"]) for record in found]
    shown = [
        [(replace(message, name=None), mark) for message, mark in zip(each.messages, each.trained, strict=True)]
        for each in reads
    ]
    return shown, "", {field for each in reads for field in each.unread}


CHANGES = [
    pytest.param(name, number, path, id=f"{name}-{number}-{'.'.join(map(str, path))}")
    for name, form in FIXTURES.items()
    for number, row in enumerate(form["rows"])
    for path in objects(row)
]


@pytest.mark.parametrize(("name", "number", "path"), CHANGES)
def test_a_message_that_is_changed_says_the_same_or_is_refused_or_counted_by_the_field(
    name: str, number: int, path: tuple[Any, ...]
) -> None:
    row = FIXTURES[name]["rows"][number]
    before = outcome(name, row)

    def check(change: Any, *fields: str) -> None:
        shown, said, unread = outcome(name, changed(row, path, change))
        if said != before[1]:
            assert any(field in said for field in fields), (said, fields)
        elif not any(f"messages[].{field}" in unread for field in fields):
            assert shown == before[0], (fields, unread)

    def renamed(message: dict[str, Any], field: str) -> dict[str, Any]:
        return {key if key != field else f"{field}_x": value for key, value in message.items()}

    for added in ("content", "role", "value", "from", "id", "cache_control", "tool_calls", "function_call", "mood"):
        for value in ("x", 5, [{"a": 1}]):
            check(lambda each, a=added, v=value: each if each.get(a) is not None else {**each, a: v}, added)
    message = row
    for key in path:
        message = message[key]
    for field in [key for key, value in message.items() if value is not None]:
        check(lambda each, f=field: renamed(each, f), field, f"{field}_x", *(["role"] if field == "from" else []))
        for value in (5, ["x"], {"a": 1}, True):
            check(lambda each, f=field, v=value: {**each, f: v}, field)


def test_a_system_text_may_be_parts() -> None:
    answered = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    parts = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    as_parts = conversations([{"system": parts, "messages": answered}], "x").records
    assert as_parts == conversations([{"system": "Be\nbrief.", "messages": answered}], "x").records
