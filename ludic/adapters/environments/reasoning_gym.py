"""All generators of the reasoning_gym package as single-turn environments, `reasoning_gym/NAME`.

reasoning_gym is imported on first use (0.6 s). Each example is drawn from its own dataset with a seed from (seed,
split, index), so every index costs the same; arc_agi, codeio, figlet_font, group_anagrams, rush_hour, spell_backward
and word_ladder read a file for each draw, 0.03 to 0.3 s.

Limits of reasoning_gym 0.1.25: isomorphic_strings, knight_swap, polynomial_multiplication, ransom_note and
word_ladder iterate over sets of strings, so they draw other examples in another process unless PYTHONHASHSEED
is set; split and example_id are computed from the question's text and stay correct. Splits differ in text, which for
arc_agi may be the same task in other colours.
"""

import ast
import inspect
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import fields
from hashlib import sha256
from math import isfinite
from random import Random
from typing import Any

from ludic.base import name_and_version
from ludic.environments import Example, Family, Score, Split, draw
from ludic.errors import ConfigError, unknown_name
from ludic.records import Message, comparable_reward

# acre mixes its kinds of question by shares of the dataset's size; 5 is the smallest size with all kinds.
DATASET_SIZE = 5


def names() -> tuple[str, ...]:
    """Return all registered generators but `composite`: a run mixes environments by naming several."""
    return tuple(sorted(_datasets().keys() - {"composite"}))


def is_known(name: str) -> bool:
    """Return whether there is a generator of this name."""
    return name in names()


def source(name: str) -> tuple[str | None, str | None]:
    """Return the path of a generator's source file, and reasoning-gym with its version."""
    file = inspect.getsourcefile(_datasets()[name][0]) if name in _datasets() else None
    return file, name_and_version("reasoning-gym")


def _datasets() -> Mapping[str, tuple[type, type]]:
    import reasoning_gym  # noqa: F401  (registers all generators)
    from reasoning_gym.factory import DATASETS

    return DATASETS


class ReasoningGym:
    """Single-turn environment of a reasoning_gym generator; reward = the generator's score_answer, from 0 to 1.

    The answer is the text in the last <answer>...</answer>, or the whole text if there are no such tags, stripped of
    blanks. The component `format` is 1 if there are tags; it does not change the reward.
    An answer is correct if its reward is 1.
    If the scorer fails or returns no finite number, the score is 0 with info["scorer_error"]; the same holds for an
    answer that the scorer would run as a program (is_harmless). Some scorers give a useless answer 0.01.
    """

    def __init__(self, generator: str, *, seed: int = 0, system_prompt: str | None = "default", **config: Any) -> None:
        """Check generator and configuration.

        system_prompt: a name in reasoning_gym.utils.SYSTEM_PROMPTS, which ask for the tags; None adds no prompt.
        config: fields of the generator's configuration, except `seed` and `size`.
        Raises ConfigError if the generator, the prompt or a field is unknown, or if the generator refuses a value.
        """
        from reasoning_gym.utils import SYSTEM_PROMPTS

        _check_known("generator", generator, names())
        if system_prompt is not None:
            _check_known("system_prompt", system_prompt, SYSTEM_PROMPTS)
        self.generator = generator
        self.seed = seed
        self.config = config
        self._preamble = (
            () if system_prompt is None else (Message(role="system", content=SYSTEM_PROMPTS[system_prompt]),)
        )
        self._scorer = self._checked_dataset()

    def example(self, index: int, split: Split) -> Example:
        entry = draw(self._entry, lambda entry: entry["question"], index, split, self.seed)
        question, answer = entry["question"], entry["answer"]
        return Example(
            example_id=sha256(question.encode()).hexdigest()[:16],
            messages=(*self._preamble, Message(role="user", content=question)),
            data={"entry": entry},
            wanted=None if answer is None else str(answer),
            columns=entry["metadata"],
        )

    def score(self, example: Example, answer: str) -> Score:
        tagged = _tagged_answer(answer)
        text = answer.strip() if tagged is None else tagged
        reward, info = self._score_text(text, example.data["entry"])
        components = {"score": reward, "format": float(tagged is not None)}
        return Score(reward=reward, correct=comparable_reward(reward) == 1, components=components, info=info)

    def _score_text(self, text: str, entry: dict[str, Any]) -> tuple[float, dict[str, str]]:
        if not is_harmless(self.generator, text):
            return 0.0, {
                "scorer_error": "refused: neither plain data nor short arithmetic, and the scorer would eval it"
            }
        try:
            reward = float(self._scorer.score_answer(text, entry))
        except Exception as error:  # A scorer may fail in any way on unexpected text.
            return 0.0, {"scorer_error": f"{type(error).__name__}: {error}"[:200]}
        if not isfinite(reward):
            return 0.0, {"scorer_error": f"the score is {reward}"}
        return reward, {}

    def _entry(self, random: Random) -> dict[str, Any]:
        # Below 2**31: pool_matrix passes its seed to NumPy, which refuses 2**32 and more.
        return self._dataset(random.randrange(2**31))[0]

    def _dataset(self, seed: int) -> Any:
        from reasoning_gym import create_dataset

        return create_dataset(self.generator, seed=seed, size=DATASET_SIZE, **deepcopy(self.config))

    def _checked_dataset(self) -> Any:
        known = [field.name for field in fields(_datasets()[self.generator][1]) if field.name not in ("seed", "size")]
        for option in self.config:
            _check_known(f"option of {self.generator}", option, known)
        try:
            return self._dataset(seed=0)
        except Exception as error:  # validate() asserts; a constructor may fail on a value in any way.
            raise ConfigError(f"reasoning_gym/{self.generator} refuses {self.config}: {error}") from error


def _tagged_answer(text: str) -> str | None:
    """Return the text of the last answer tag, as reasoning_gym.utils.extract_answer does, but not in quadratic time."""
    before, close_tag, _ = text.rpartition("</answer>")
    _, open_tag, inside = before.rpartition("<answer>")
    return inside.partition("</answer>")[0].strip() if open_tag and close_tag else None


def _check_known(what: str, name: str, known: Iterable[str]) -> None:
    wanted = sorted(known)
    if name not in wanted:
        raise ConfigError(f"reasoning_gym: {unknown_name(what, name, wanted)}")


# --- Answers that a scorer would run ---------------------------------------------------------------------


# Keep a model's text away from eval(): some of reasoning_gym's scorers run the answer as Python.
#
# In reasoning_gym 0.1.25 four scorers call eval() and five sympy.parse_expr(), which also calls eval(). So
# "__import__('os')..." would run on the worker, and "9**9**9**9" would never return. So the answer's
# syntax tree first; an answer that is neither plain data nor plain arithmetic is refused and not scored.
#
# Two limits: an answer "Integral(f, x)", which intermediate_integration sometimes gives itself and accepts, is refused;
# the evaluated integral is accepted. And sympy.simplify, which that scorer calls, may still take minutes on a harmless
# but strange product of functions.

EVALUATED_AS_DATA = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
EVALUATED_AS_ARITHMETIC = frozenset(
    {"countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration"}
)
FUNCTIONS = frozenset({"exp", "log", "sin", "cos", "tan", "asin", "acos", "atan", "sqrt"})
MAX_CHARACTERS = 500
MAX_NUMBER = 10**12
MAX_EXPONENT = 50

_DATA = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.USub)
_ARITHMETIC = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.USub, ast.UAdd, ast.BinOp, ast.Call),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow),
)


def is_harmless(generator: str, answer: str) -> bool:
    """Return whether the answer is safe for the scorer of this generator."""
    if generator in EVALUATED_AS_DATA:
        tree = _syntax_tree(answer)
        return tree is None or all(isinstance(node, _DATA) for node in ast.walk(tree))
    if generator in EVALUATED_AS_ARITHMETIC:
        # Text that does not parse is not harmless here: sympy rewrites it first ("9!" becomes a call).
        tree = _syntax_tree(answer) if len(answer) <= MAX_CHARACTERS else None
        return tree is not None and all(_is_small_arithmetic(node) for node in ast.walk(tree))
    return True


def _syntax_tree(answer: str) -> ast.Expression | None:
    try:
        return ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _is_small_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return _is_number(node, MAX_NUMBER)
    if isinstance(node, ast.Call):
        return _is_plain_call(node)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return not _contains(node.left, ast.Pow) and _is_small_exponent(node.right)
    return isinstance(node, _ARITHMETIC)


def _is_plain_call(node: ast.Call) -> bool:
    """Return whether a call has one argument without a call in it: exp(exp(exp(99))) fills the memory."""
    known = isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS
    return known and len(node.args) == 1 and not node.keywords and not _contains(node.args[0], ast.Call)


def _is_small_exponent(node: ast.AST) -> bool:
    """Return whether an exponent is a name, a number, or a fraction such as 3/2, with or without a sign."""
    if isinstance(node, ast.UnaryOp):
        return _is_small_exponent(node.operand)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _is_number(node.left, MAX_EXPONENT) and _is_number(node.right, MAX_EXPONENT)
    return isinstance(node, ast.Name) or _is_number(node, MAX_EXPONENT)


def _is_number(node: ast.AST, largest: int) -> bool:
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, int | float) and value <= largest


def _contains(node: ast.AST, kind: type[ast.AST]) -> bool:
    return any(isinstance(part, kind) for part in ast.walk(node))


FAMILY = Family(make=ReasoningGym, names=names, is_known=is_known, source=source)
