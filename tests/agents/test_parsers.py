"""Parsers: what passes on, what the model is told, and that no text makes a built-in parser raise."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.agents import parsers
from ludic.agents.parsers import Parsed, make_parser
from ludic.errors import ConfigError

OWN = """
from dataclasses import dataclass
from ludic.agents.parsers import Parsed

class Upper:
    def parse(self, text):
        if not text:
            return Parsed(action=None, feedback="Say something.", reward=-0.5)
        return Parsed(action=text.upper(), reward=0.25)

class Text:
    def parse(self, text):
        return text

class Nothing:
    pass

class Needs:
    def __init__(self, argument):
        self.argument = argument

@dataclass
class Move:
    row: int
    column: int = 0

number = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return str(path)


@pytest.mark.parametrize(
    ("spec", "text", "action"),
    [
        ("whole", " as it\nis ", " as it\nis "),
        ("whole", "", ""),
        ("tag:answer", "so <answer>4</answer>.", "4"),
        ("tag:answer", "<answer>\n 4 \n</answer>", "4"),
        ("tag:answer", "<answer></answer>", ""),
        ("tag:answer", "<answer>4</answer> or <answer>5</answer>", "5"),
        ("tag:answer", "<answer>4</answer> or <answer>5", "4"),
        ("tag:answer", "<answer>4</answer> or 5</answer>", "4"),
        ("tag:answer", "<answer>4 <answer>5</answer>", "5"),
        ("tag:answer", "<answer>a < b > c <b>d</b></answer>", "a < b > c <b>d</b>"),
        ("boxed", r"so \boxed{4}.", "4"),
        ("boxed", r"\boxed{4} and \boxed{ 5 }", "5"),
        ("boxed", r"\boxed{4} and \boxed{5", "4"),
        ("boxed", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("boxed", r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("boxed", r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        ("boxed", r"{ \boxed{4} } }", "4"),
        ("boxed", r"x = 1 \\\boxed{4}", "4"),
        ("boxed", r"\\boxed{4}", "4"),
        ("boxed", r"\boxed{a \boxed{b}}", "b"),
        ("json", ' {"b": 1, "a": [true, null, 1.50]} ', '{"a":[true,null,1.5],"b":1}'),
        ("json", "4", "4"),
        ("json", 'First:\n```json\n{"a": 1}\n```\nThen:\n```\n[2]\n```\n{"a": 3}', "[2]"),
        ("json", 'I take {"a": 1}, no, {"a": {"b": "}{"}}, in {x}.', '{"a":{"b":"}{"}}'),
        ("json", '{"a": {"b": 1} is half, {"c": 2} whole, {"d": 3', '{"c":2}'),
        ("json", r"```python" '\nx = {}\n```\nso {"é": "\\u00e9"}', '{"é":"é"}'),
        ("regex:[0-9]+", "1, 22, 333.", "333"),
        ("regex:move ([a-h][1-8])", "move a1, move b2!", "b2"),
        ("regex:(yes)|no", "yes or no", "no"),
        ("regex:a(b*)", "abb a", ""),
        ("think", "<think>2 + 2</think>\n\n4\n", "4"),
        ("think", "\n<think></think>4", "4"),
        ("think", "2 + 2</think>4", "4"),
        ("think|tag:answer", "<think><answer>3</answer></think> <answer>4</answer>", "4"),
        (r" think | boxed | regex:\d+|x", r"a</think> \boxed{12 apples}", "12"),
    ],
)
def test_an_action_is_found(spec: str, text: str, action: str) -> None:
    parsed = make_parser(spec).parse(text)
    assert parsed == Parsed(action=action, start=parsed.start)
    # JSON is rewritten; the others say where the action is.
    assert (parsed.start is None) == (spec == "json")
    assert parsed.start is None or text.startswith(action, parsed.start)


@pytest.mark.parametrize(
    ("spec", "text", "found", "wanted"),
    [
        ("tag:answer", "4", "it has no <answer>", "Write your answer as <answer>...</answer>."),
        ("tag:answer", "<answer>4", "<answer> has no </answer> after it", "Write your answer as"),
        ("tag:answer", "4</answer>", "it has </answer> without <answer> before it", "Write your answer as"),
        ("tag:answer", "</answer><answer>", "<answer> has no </answer> after it", "Write your answer as"),
        ("tag:answer", "<Answer>4</Answer>", "it has no <answer>", "Write your answer as"),
        ("boxed", "{4}", r"it has no \boxed{...}", r"Write your final answer as \boxed{...}."),
        ("boxed", r"\boxed{\frac{1}{2}", r"a \boxed{ is not closed", "Write your final answer as"),
        ("json", "4 or 5", "it holds no valid JSON (JSON is malformed: ", "Write your answer as JSON, such as {...}."),
        ("json", "", "it holds no valid JSON (", "Write your answer as JSON"),
        ("json", '{"a": NaN}', "it holds no valid JSON (", "Write your answer as JSON"),
        ("json", "```\n{'a': 1}\n```", "it holds no valid JSON (", "Write your answer as JSON"),
        ("json", '{"a": 1e999}', "its JSON has the wrong form (Number out of range - at ", "Correct it"),
        ("json", "[" * 100_000, "it holds no valid JSON (", "Write your answer as JSON"),
        ("regex:move (.)", "stay", "the expected pattern is not in it", "Write text that matches move (.)."),
        ("think", "4", "it has no </think>", "Think once, in <think>...</think> at the start, then write your answer."),
        ("think", "<think>2 + 2", "it has no </think>", "Think once"),
        ("think", "<think>a</think>4</think>5", "it has 2 </think>", "Think once"),
        ("think", "<think>a</think>4<think>b", "it has <think> elsewhere than at its start", "Think once"),
        ("think", "Hm <think>a</think>4", "it has <think> elsewhere than at its start", "Think once"),
        ("think", "<think>a</think> \n", "nothing follows </think>", "Think once"),
        ("think|tag:answer", "<think><answer>3</answer></think>4", "it has no <answer>", "Write your answer as"),
    ],
)
def test_feedback_says_what_was_found_and_what_was_wanted(spec: str, text: str, found: str, wanted: str) -> None:
    parsed = make_parser(spec, format_reward=0.5).parse(text)
    assert parsed.action is None
    assert parsed.reward == 0.0
    assert parsed.feedback is not None
    assert parsed.feedback.startswith(f"Your reply could not be read: {found}")
    assert wanted in parsed.feedback


def test_json_that_is_never_closed_is_not_read_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = 0

    class Counting(json.JSONDecoder):
        def raw_decode(self, text: str, start: int = 0) -> tuple:
            nonlocal num_read
            try:
                return super().raw_decode(text, start)
            except json.JSONDecodeError as error:
                num_read += error.pos - start
                raise

    monkeypatch.setattr(parsers, "_SCANNER", Counting())
    broken = '{"a":' * 500 + "x"
    assert make_parser("json").parse(broken * 20).action is None
    assert num_read < parsers.MAX_SCANNED + len(broken)  # all of it: 12 million
    assert make_parser("json").parse(broken + '{"b": 1}').action == '{"b":1}'


SPECS = ("whole", "tag:a", "boxed", "json", "regex:a(b)?", "think", "think|tag:a", "boxed|json")
PIECES = ("<a>", "</a>", "<think>", "</think>", "\\", "boxed{", "{", "}", "[", '"', ":", "```", "\n", "\ud800", "1")
ANY_TEXT = st.text(st.characters()) | st.lists(st.sampled_from(PIECES)).map("".join)


@pytest.mark.parametrize("spec", SPECS)
@given(text=ANY_TEXT)
def test_no_text_makes_a_built_in_parser_raise(spec: str, text: str) -> None:
    parsed = make_parser(spec).parse(text)
    assert (parsed.action is None) == bool(parsed.feedback)


@given(before=ANY_TEXT, text=ANY_TEXT.filter(lambda text: "<a>" not in text and "</a>" not in text))
def test_a_text_in_tags_is_found_after_any_other(before: str, text: str) -> None:
    assert make_parser("tag:a").parse(f"{before}<a>{text}</a>").action == text.strip()


BALANCED = st.recursive(
    st.text(st.characters(exclude_characters="{}\\")), lambda inner: st.tuples(inner, inner).map(r"\f{%s}%s".__mod__)
)


@given(before=st.text(st.characters(exclude_characters="\\")), text=BALANCED)
def test_a_text_with_balanced_braces_is_found_in_a_box(before: str, text: str) -> None:
    assert make_parser("boxed").parse(rf"{before}\boxed{{{text}}}").action == text.strip()


NO_THINKING_MARKS = ANY_TEXT.filter(lambda text: "<think>" not in text and "</think>" not in text)


@given(thought=NO_THINKING_MARKS, answer=NO_THINKING_MARKS, opening=st.sampled_from(["", "<think>", " \n<think>"]))
def test_an_answer_is_what_follows_the_thinking(thought: str, answer: str, opening: str) -> None:
    assert make_parser("think").parse(f"{opening}{thought}</think>{answer}").action == (answer.strip() or None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    value=st.dictionaries(st.text(max_size=5), JSON, max_size=3),
    before=st.text(st.characters(exclude_characters='{["`')),
)
def test_json_is_the_same_text_alone_in_a_block_and_at_the_end(value: dict, before: str) -> None:
    text = json.dumps(value, indent=1)
    canonical = make_parser("json").parse(text).action
    assert canonical is not None
    assert json.loads(canonical) == value
    assert make_parser("json").parse(f"{before}\n```json\n{text}\n```").action == canonical
    assert make_parser("json").parse(f"{before}{text}").action == canonical


def test_the_format_reward_is_given_once_for_a_completion_that_every_stage_accepts() -> None:
    parser = make_parser("think|tag:a", format_reward=0.5)
    assert parser.parse("x</think><a>4</a>") == Parsed(action="4", reward=0.5, start=len("x</think><a>"))
    assert parser.parse("x</think>4").reward == 0.0


def test_json_is_checked_against_a_type_of_ones_own(own: str) -> None:
    parser = make_parser(f"json:{own}:Move")
    assert parser.parse('I play {"row": 1, "why": "centre"}').action == '{"row":1,"why":"centre"}'
    assert parser.parse('{"row": "one"}').feedback == (
        "Your reply could not be read: its JSON has the wrong form (Expected `int`, got `str` - at `$.row`). "
        "Correct it and write all of it again."
    )


def test_a_parser_of_ones_own_is_a_stage_like_others_and_rewards_add_up(own: str) -> None:
    parser = make_parser(f"tag:a|{own}:Upper|{own}:Upper", format_reward=1.0)
    assert parser.parse("<a>go</a>") == Parsed(action="GO", reward=1.5)
    assert parser.parse("<a></a>") == Parsed(action=None, feedback="Say something.", reward=-0.5)


def test_a_parser_of_ones_own_that_returns_text_is_named(own: str) -> None:
    with pytest.raises(TypeError, match=r"own\.py:Text: parse returned str, wanted ludic\.agents\.parsers\.Parsed"):
        make_parser(f"{own}:Text").parse("4")


@pytest.mark.parametrize("values", [{"action": None}, {"action": "4", "feedback": "no"}])
def test_a_result_is_an_action_or_feedback(values: dict) -> None:
    with pytest.raises(ValueError, match="wanted one of them, the other None"):
        Parsed(**values)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tags:answer", "parser 'tags:answer' is unknown; did you mean 'tag:NAME'? There are whole, tag:NAME, boxed"),
        ("zzz", "parser 'zzz' is unknown; there are whole, "),
        ("think|", "parser '' is unknown"),
        ("whole:1", "parser 'whole:1' is unknown; did you mean 'whole'?"),
        ("tag", "parser 'tag' is unknown; did you mean 'tag:NAME'?"),
        ("tag:<answer>", "names the tag '<answer>'"),
        ("regex:(", "parser regex:( is not a regular expression of Python: missing )"),
        ("think|none.py:Own", "parser none.py:Own: there is no file "),
        ("json:none.py:Own", "parser none.py:Own: there is no file "),
        ("s3://bucket/own.py:Own", "a URL; wanted a path on this machine"),
    ],
)
def test_an_unknown_parser_is_answered_with_what_there_is(spec: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_parser(spec)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{own}:Other", "has no class or function 'Other'"),
        ("{own}:Nothing", "Nothing has no method 'parse', which a parser needs"),
        ("{own}:Needs", "could not be built without arguments: TypeError: "),
        ("json:{own}:Nothing", "Nothing: wanted a dataclass, a TypedDict"),
        ("json:{own}:number", "has no class or function 'number'"),
    ],
)
def test_a_file_that_gives_no_parser_is_named(own: str, spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_parser(spec.format(own=own))


def test_a_format_reward_is_finite() -> None:
    with pytest.raises(ConfigError, match="format_reward is nan, wanted a finite number"):
        make_parser("whole", format_reward=float("nan"))


def test_a_file_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise KeyError('ran')")
    with pytest.raises(ConfigError, match="line 1, failed: KeyError: 'ran'"):
        make_parser(f"think|{tmp_path}/fails.py:Own")
