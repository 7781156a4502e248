"""Every form of conversations and pairs, in every container, gives the tokens of a plain list of messages.

forms/ has a file for each: rows as people have them, what they are as plain messages, and rows that are refused. The
table in docs/fit.md is made of the same files.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
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
from ludic.adapters.imports.forms import CONVERSATIONS, PAIRS, Read, conversations, form_of, pairs
from ludic.adapters.imports.importing import Imported, import_file
from ludic.cli.docs import FORMS, forms_table, read_forms
from ludic.data_files import SUFFIXES
from ludic.errors import ConfigError
from ludic.models.tiny import TOOL_TEMPLATE
from ludic.operations.fit_inputs import Inputs, read_rows
from ludic.records import Rollout, new_id
from ludic.schema import arrow_schema, from_table
from ludic.store import Root, RunConfig, list_files, read_columns
from ludic.store.records import ImportReport

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
    root, tokenizer = Root.create(f"memory://{new_id()}", RunConfig(model="none", env=("cats",))), chat_tokenizer()
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
    with pytest.raises(ConfigError, match="x, row 1 is Alpaca, and the rows before it are ShareGPT; wanted one form a"):
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


def test_the_page_has_the_table_of_these_fixtures() -> None:
    table = forms_table(HERE)
    assert table in (HERE / "docs" / "fit.md").read_text(encoding="utf-8")
    for form in FIXTURES.values():
        assert all(each["why"] in table for each in form["refused"])
        assert form["reads"] in table


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
    monkeypatch.setattr("ludic.operations.start.train", lambda *args, **options: None)
    caplog.set_level(logging.INFO, "ludic")
    path = write_rows(tmp_path / "chats.json", [{"conversations": FIXTURES["sharegpt"]["rows"][0]["conversations"]}])
    ludic.sft(model=model_folder, dataset=path, root=tmp_path / "run")
    told = [record.message for record in caplog.records if "read as" in record.message]
    assert told == [f"{path}: read as ShareGPT: 1 conversation"]
