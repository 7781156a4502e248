"""Pair the equal environments and examples of two sides of a comparison, also under different names.

Environments of questions are equal if their rows and options are; other environments, and those without a record, if
their names are. Examples are paired by id, or by the stored question and answer if the two sides make ids from
different rows or in different ways. Reads evaluations/ and evals/.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ludic.eval.estimates import Samples
from ludic.root import STORED, EvaluationRecord, from_dicts, is_questions
from ludic.root.sql import figure
from ludic.settings import SCORER_OPTIONS

_REWARDS = re.compile(r"\A(?:.*/)?inputs/(?:[0-9a-f]{16}/)?(?=reward\.py:)")
"""Folder of the rewards that ludic.fit writes, in the names of scorers; each root has its own."""


_CHOOSING = ("split", "config", "revision")
"""Options of questions that choose a part or a version of a data set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledEnvironment:
    """An environment of one side, with the record of its evaluation."""

    name: str
    record: EvaluationRecord | None
    """Record of the evaluation; None if `ludic eval` did not sample it."""

    @property
    def content(self) -> tuple[Any, ...] | None:
        """Digests of the rows of questions; None for other environments, and if unknown."""
        if self.record is None or not is_questions(self.name):
            return None
        codes = from_dicts(self.record.code)
        code = next((each for each in codes if (each.role, each.name) == ("environment", self.name)), None)
        return None if code is None or code.sha256 is None else tuple(sorted(code.digests.items()))

    @property
    def options(self) -> Any:
        """Its options, as `comparable_options` returns them."""
        return None if self.record is None else comparable_options(self.record.settings.get("env_options"))

    @property
    def selected(self) -> tuple[Any, ...]:
        """Options that choose other rows of the same files or the same name."""
        options = self.options if isinstance(self.options, Mapping) else {}
        # A file of held-out rows is one of the digests of content, whatever its name; a split is not.
        has_digest = any(name == "heldout" for name, _ in self.content or ())
        return tuple(options.get(name) for name in (_CHOOSING if has_digest else (*_CHOOSING, "heldout")))

    @property
    def example_ids(self) -> str:
        """Identification of examples of questions (ludic.base.defaults.ExampleIds)."""
        settings = {} if self.record is None else self.record.settings
        own = settings.get("env_options")
        given = own.get("example_ids") if isinstance(own, Mapping) else None
        return str(given or settings.get("example_ids", "question"))


def comparable_options(options: Any) -> Any:
    """Return options without the names of data and rewards in a root, whose digests the records hold."""
    if not isinstance(options, Mapping):
        return options
    kept = {name: value for name, value in options.items() if name not in (*STORED, "example_ids")}
    return kept | {name: _without_folder(kept[name]) for name in SCORER_OPTIONS if name in kept}


def comparable_name(name: str) -> str:
    """Return the name of a scorer without the folder of a root."""
    return _REWARDS.sub("", name)


def _without_folder(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {comparable_name(name): _without_folder(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folder(each) for each in value]
    return comparable_name(value) if isinstance(value, str) else value


def pair_environments(
    first: Iterable[SampledEnvironment], other: Iterable[SampledEnvironment]
) -> list[tuple[str, str]]:
    """Return the names of equal environments, each at most once, by the name that the first side has.

    Rows and options decide, then rows, then names: so equal names with other rows are paired last.
    """
    left, right = sorted(first, key=lambda each: each.name), sorted(other, key=lambda each: each.name)
    found = []
    for is_same in _WAYS:
        for a in list(left):
            b = next((each for each in right if is_same(a, each)), None)
            if b is not None:
                found.append((a.name, b.name))
                left.remove(a)
                right.remove(b)
    return sorted(found)


def _has_same_rows(a: SampledEnvironment, b: SampledEnvironment) -> bool:
    return a.content is not None and a.content == b.content


_WAYS: tuple[Callable[[SampledEnvironment, SampledEnvironment], bool], ...] = (
    lambda a, b: a.name == b.name and (a.content is None or b.content is None or a.content == b.content),
    lambda a, b: _has_same_rows(a, b) and a.options == b.options,
    _has_same_rows,
    lambda a, b: a.name == b.name,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Pairing of the examples of two sides."""

    a: Mapping[str, str] | None = None
    """Common key of an example by the baseline's id; None: the id is the key."""
    b: Mapping[str, str] | None = None
    """The same by the other side's id."""
    warnings: tuple[str, ...] = ()

    def common(self, of_a: Iterable[str], of_b: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yield the ids of the same example on both sides, in the order of the baseline."""
        a, b = self.a, self.b
        here = {each if b is None else b[each]: each for each in of_b if b is None or each in b}
        for each in of_a:
            key = each if a is None else a.get(each)
            if key is not None and key in here:
                yield each, here[key]


def pair_examples(a: SampledEnvironment, b: SampledEnvironment, of_a: Samples, of_b: Samples) -> Examples:
    """Return the pairing of examples: by id, if both sides make ids in the same way from the same rows."""
    if a.record is None or b.record is None or not is_questions(a.name):
        return Examples()
    has_same_rows = a.content == b.content and a.selected == b.selected and (a.content is not None or a.name == b.name)
    if a.example_ids == b.example_ids and (has_same_rows or a.example_ids == "question"):
        return Examples()
    rows = [samples.ask(figure("question_keys")).to_pylist() for samples in (of_a, of_b)]
    # Rows of an older schema hold no answers; then only the question is common to both.
    with_answer = all(any(row["wanted"] is not None for row in each) for each in rows)
    keys, num_left_out, num_unasked = [], 0, 0
    for each in rows:
        found = [row for row in each if row["question"] is not None]
        num_unasked += len(each) - len(found)
        by_id = {row["env_example_id"]: f"{row['question']} {row['wanted'] if with_answer else ''}" for row in found}
        times = Counter(by_id.values())
        keys.append({name: key for name, key in by_id.items() if times[key] == 1})
        num_left_out += len(by_id) - len(keys[-1])
    why = "holds other rows here" if not has_same_rows else "has ids that are made in another way here"
    text = f"the environment {why}, so examples are paired by question{' and answer' if with_answer else ''}"
    ambiguous = f"; {num_left_out} that share them with another one are left out" if num_left_out else ""
    unasked = f"; {num_unasked} that failed before the first prompt are left out" if num_unasked else ""
    return Examples(a=keys[0], b=keys[1], warnings=(text + ambiguous + unasked,))
