r"""Parse the text of a completion into an action for the environment, or into feedback for the model.

A parser is named by a setting:

    whole                   the text as it is
    tag:NAME                content of the last complete <NAME>...</NAME>
    boxed                   content of the last complete \boxed{...}
    json                    the text, its last fenced block, or its last JSON object, as canonical JSON
    json:FILE.py:TYPE       the same, checked against a dataclass, TypedDict or msgspec.Struct of yours
    regex:PATTERN           group 1 of the last match, or the match if the pattern has no group
    think                   the answer that follows a <think>...</think> block
    path/to/file.py:CLASS   a class of your own, built without arguments

Parsers joined with | run from left to right, each on the action of the one before: think|tag:answer. A regex takes
the rest of the setting, so that its pattern may contain |; it can only be last. Settings that name no parser raise
ConfigError.
"""

import json
import math
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from ludic.errors import ConfigError
from ludic.records import add_rewards
from ludic.settings import (
    NO_FILES,
    PARSER,
    Files,
    build_own,
    find,
    find_own,
    own_code_of,
    parser_stages,
    python_file_of,
)
from ludic.settings.kinds import unknown

DEFAULT = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """Result of a parser: an action, or feedback. Raises ValueError if both or neither are given."""

    action: str | None
    """Text that is passed on; None after a failure."""
    feedback: str | None = None
    """Message to the model after a failure; None after success."""
    reward: float = 0.0
    """Format reward of the completion."""
    start: int | None = None
    """Index of the action in the text that was parsed; None if it is not known, or if the action was rewritten."""

    def __post_init__(self) -> None:
        if (self.action is None) == (self.feedback is None):
            raise ValueError(
                f"Parsed has action {self.action!r} and feedback {self.feedback!r}; wanted one of them, the other None"
            )


class Parser(Protocol):
    """Parser of completions; one instance serves all episodes, side by side, so `parse` keeps no state.

    Built-in parsers accept any text. An error that a user's parser raises fails the episode.
    """

    def parse(self, text: str) -> Parsed:
        """Return the action in a completion's text, or feedback: the error found, and the wanted form."""
        ...


def make_parser(spec: str, *, format_reward: float = 0.0, files: Files = NO_FILES) -> Parser:
    """Return the parser that a setting names; runs the users' files in it.

    format_reward: added to the reward of each completion that every stage accepts. files: files to run instead of
    those on disk, by path as in the setting. Raises ConfigError, also if format_reward is not finite.
    """
    if not math.isfinite(format_reward):
        raise ConfigError(f"format_reward is {format_reward}, wanted a finite number")
    return _Pipe(tuple(_make_stage(stage, files) for stage in parser_stages(spec)), format_reward)


def _make_stage(stage: str, files: Files) -> Parser:
    if stage.startswith("json:"):
        return typed_json(stage.removeprefix("json:"), files)
    make = find(PARSER, stage, files)
    return make() if own_code_of(PARSER, stage) is None else _Own(stage, build_own(PARSER, stage, make, "parse"))


@dataclass(frozen=True, slots=True)
class _Pipe:
    """Stages, each applied to the action of the previous one; rewards add up."""

    stages: Sequence[Parser]
    format_reward: float

    def parse(self, text: str) -> Parsed:
        parsed, rewards = Parsed(action=text), list[float]()
        start: int | None = 0
        for stage in self.stages:
            assert parsed.action is not None
            parsed = stage.parse(parsed.action)
            rewards.append(parsed.reward)
            if parsed.action is None:
                return replace(parsed, reward=add_rewards(rewards))
            start = None if start is None or parsed.start is None else start + parsed.start
        return replace(parsed, reward=add_rewards([*rewards, self.format_reward]), start=start)


@dataclass(frozen=True, slots=True)
class _Own:
    """A user's parser. Raises TypeError if it returns no Parsed."""

    name: str
    parser: Any

    def parse(self, text: str) -> Parsed:
        parsed = self.parser.parse(text)
        if not isinstance(parsed, Parsed):
            raise TypeError(
                f"parser {self.name}: parse returned {type(parsed).__name__}, wanted ludic.agents.parsers.Parsed"
            )
        return parsed


def _failure(found: str, wanted: str) -> Parsed:
    return Parsed(action=None, feedback=f"Your reply could not be read: {found}. {wanted}.")


def _part(text: str, start: int, end: int | None = None) -> Parsed:
    """Return a part of the text as the action, without the spaces around it."""
    part = text[start:end]
    return Parsed(action=part.strip(), start=start + len(part) - len(part.lstrip()))


class Whole:
    def parse(self, text: str) -> Parsed:
        return Parsed(action=text, start=0)


_TAG_NAME = re.compile(r"[A-Za-z_][\w.-]*")


def tag(name: str) -> "_Tag":
    if not _TAG_NAME.fullmatch(name):
        raise ConfigError(f"parser 'tag:{name}' names the tag {name!r}; wanted letters and digits, as in tag:answer")
    return _Tag(name)


@dataclass(frozen=True, slots=True)
class _Tag:
    name: str

    def parse(self, text: str) -> Parsed:
        opening, closing = f"<{self.name}>", f"</{self.name}>"
        before, last_closing, _ = text.rpartition(closing)
        start = before.rfind(opening)
        if last_closing and start >= 0:
            start += len(opening)
            return _part(text, start, text.index(closing, start))
        if opening in text:
            found = f"{opening} has no {closing} after it"
        else:
            found = f"it has {closing} without {opening} before it" if last_closing else f"it has no {opening}"
        return _failure(found, f"Write your answer as {opening}...{closing}")


# A double backslash before "boxed" is taken too: models escape it when they write JSON.
_BRACES = re.compile(r"\\\\?boxed\{|\\.|[{}]", re.DOTALL)


class Boxed:
    def parse(self, text: str) -> Parsed:
        last, num_open = _last_box(text)
        if last is not None:
            return _part(text, *last)
        found = r"a \boxed{ is not closed" if num_open else r"it has no \boxed{...}"
        return _failure(found, r"Write your final answer as \boxed{...}")


def _last_box(text: str) -> tuple[tuple[int, int] | None, int]:
    r"""Return where the content of the last complete \boxed{...} begins and ends, and the number of those never closed.

    The last box is the one that begins last. Escaped braces do not count. Reads the text once, so many openings take no
    extra time.
    """
    last: tuple[int, int] | None = None
    starts: list[int | None] = []  # starts of the open braces; None for a brace that does not belong to \boxed
    for token in _BRACES.finditer(text):
        if token[0].endswith("boxed{"):
            starts.append(token.end())
        elif token[0] == "{":
            starts.append(None)
        elif token[0] == "}" and starts:
            start = starts.pop()
            if start is not None:
                last = max(last or (0, 0), (start, token.start()))
    return last, sum(start is not None for start in starts)


@dataclass(frozen=True, slots=True)
class _Regex:
    pattern: re.Pattern[str]

    def parse(self, text: str) -> Parsed:
        matches = deque(self.pattern.finditer(text), maxlen=1)
        if not matches:
            return _failure("the expected pattern is not in it", f"Write text that matches {self.pattern.pattern}")
        match = matches[0]
        group = 1 if match.groups() and match[1] is not None else 0
        return Parsed(action=match[group], start=match.start(group))


def regex(pattern: str) -> _Regex:
    try:
        return _Regex(re.compile(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"parser regex:{pattern} is not a regular expression of Python: {error}") from error


class Think:
    def parse(self, text: str) -> Parsed:
        opening, closing = "<think>", "</think>"
        thinking, _, answer = text.partition(closing)
        found = None
        if text.count(closing) != 1:
            found = f"it has {text.count(closing) or 'no'} {closing}"
        elif opening in answer or opening in thinking.lstrip().removeprefix(opening):
            found = f"it has {opening} elsewhere than at its start"
        elif not answer.strip():
            found = f"nothing follows {closing}"
        if found is None:
            return _part(text, len(thinking) + len(closing))
        return _failure(found, f"Think once, in {opening}...{closing} at the start, then write your answer")


@dataclass(frozen=True, slots=True)
class JsonParser:
    decoder: msgspec.json.Decoder[Any] | None = None
    """Decoder that checks the value; None accepts any."""

    def parse(self, text: str) -> Parsed:
        errors = []
        for candidate in _json_texts(text):
            try:
                value = msgspec.json.decode(candidate)
                if self.decoder is not None:
                    self.decoder.decode(candidate)
                return Parsed(action=msgspec.json.encode(value, order="sorted").decode())
            except msgspec.ValidationError as error:
                return _failure(f"its JSON has the wrong form ({error})", "Correct it and write all of it again")
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                errors.append(str(error))
        return _failure(f"it holds no valid JSON ({errors[-1]})", "Write your answer as JSON, such as {...}")


_FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


def _json_texts(text: str) -> Iterator[str]:
    """Yield the texts that may be the JSON: all of it, its last fenced block, its last object."""
    yield text
    fenced = deque(_FENCED.finditer(text), maxlen=1)
    if fenced:
        yield fenced[0][1]
    last = _last_object(text)
    if last is not None:
        yield last


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_SCANNER = json.JSONDecoder(parse_constant=_refuse)


class _WithoutLines(str):
    """A text whose lines are not counted: JSONDecodeError counts lines before each error, in time that grows with the
    text."""

    __slots__ = ()

    def count(self, *_: object) -> int:
        return 0

    def rfind(self, *_: object) -> int:
        return -1


_OBJECT_START = re.compile(r"\{\s*[\"}]")  # most braces in code and LaTeX begin no object
MAX_SCANNED = 1_000_000
"""Maximum characters of broken JSON that are searched for an object; each brace in it is tried again."""


def _last_object(text: str) -> str | None:
    """Return the last JSON object in a text that is not part of another; None if there is none.

    The search ends early after MAX_SCANNED characters of broken JSON.
    """
    scanned, found, start, num_left = _WithoutLines(text), None, _OBJECT_START.search(text), MAX_SCANNED
    while start is not None and num_left > 0:
        try:
            _, end = _SCANNER.raw_decode(scanned, start.start())
            found = text[start.start() : end]
        except ValueError as error:
            end = start.start() + 1
            num_left -= getattr(error, "pos", len(text)) - start.start()  # that of a constant does not say where it is
        except RecursionError:  # thousands of open braces; each would take as long again
            return found
        start = _OBJECT_START.search(text, end)
    return found


def typed_json(name: str, files: Files = NO_FILES) -> JsonParser:
    """Return the parser json:path/to/file.py:TypeName."""
    if python_file_of(name) is None:
        raise unknown(PARSER, f"json:{name}")
    found = find_own(PARSER, name, files).value
    try:
        msgspec.json.schema(found)  # raises for types that JSON can't represent
        return JsonParser(msgspec.json.Decoder(found))
    except (TypeError, RuntimeError, NameError) as error:
        raise ConfigError(
            f"parser json:{name}: wanted a dataclass, a TypedDict or another type that msgspec checks JSON against; "
            f"{error}"
        ) from error
