"""Colour the tokens of a response by logprob, advantage, ratio or mask: a class of the page's style for each token.

The classes q0 to q7 are a scale of one hue, from likely to unlikely; n4 to n1, z and p1 to p4 go from blue over nothing
to orange, which readers with any colour vision tell apart. The style names their colours (style sheet of the page).
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludic.app.show.transcript import Color, TokenReader, TokenRow, token_rows
from ludic.base import number

TOKENS_A_PAGE = 1_000
"""Maximum tokens of a response on one page."""

_BEFORE = 8
"""Tokens that are decoded before a page's first: a tokenizer drops the space before the first word of a text."""
_LEAST_PROBABILITIES = (0.99, 0.9, 0.7, 0.5, 0.2, 0.05, 0.01, 0.0)
"""Least probability of the classes q0 to q7."""
_RATIO_STEPS = (1.01, 1.05, 1.2, 1.5)
"""Least ratio of the classes p1 to p4; n1 to n4 begin at their inverses."""
_SHARES = (0.25, 0.5, 0.75)
"""Largest share of the largest advantage of the classes p1 to p3, and n1 to n3."""
_NOT_SAMPLED = "ns"
_SAMPLED = "q2"


@dataclass(frozen=True, slots=True)
class ColouredToken:
    """One token as the page shows it."""

    text: str
    css: str
    """Class of its colour; empty without one."""
    title: str
    """Its numbers, shown under the pointer."""


@dataclass(frozen=True, slots=True)
class ColourKey:
    """One line of the legend."""

    css: str
    text: str


def read_tokens(row: Mapping[str, Any], reader: TokenReader, start: int, end: int) -> list[TokenRow]:
    """Return tokens start to end of a row's response, each with the text that it adds to the tokens before it."""
    first = max(0, start - _BEFORE)
    return token_rows(dict(row), reader, first, end)[start - first :]


def own_advantage(token: TokenRow, advantage: float | None) -> float | None:
    """Return the advantage of a token: its own, or else that of the rollout; None for tokens that were not sampled."""
    if not token.sampled:
        return None
    return advantage if token.advantage is None else token.advantage


def advantage_scale(rows: Iterable[tuple[Sequence[TokenRow], float | None]]) -> float:
    """Return the largest absolute advantage of some responses, each with its rollout's advantage; 0.0 without any."""
    found = (own_advantage(token, advantage) for tokens, advantage in rows for token in tokens)
    return max((abs(value) for value in found if value is not None and math.isfinite(value)), default=0.0)


def coloured(
    tokens: Sequence[TokenRow], color: Color, advantage: float | None, scale: float, *, first: int = 0
) -> list[ColouredToken]:
    """Return tokens with their classes and numbers. scale: see `advantage_scale`. first: index of the first token."""
    return [
        ColouredToken(token.text, _css(token, color, advantage, scale), _title(index, token, advantage))
        for index, token in enumerate(tokens, start=first)
    ]


def legend(color: Color, tokens: Sequence[TokenRow], advantage: float | None, scale: float) -> list[ColourKey]:
    """Return the classes of a colouring with what they mean, and those that tokens without a number have."""
    keys = list(_keys(color, scale))
    if not any(_css(token, color, advantage, scale) for token in tokens if token.sampled) and color != "none":
        keys = [ColourKey("", _ABSENT[color])]
    if color != "none" and any(not token.sampled for token in tokens):
        keys.append(ColourKey(_NOT_SAMPLED, "not sampled"))
    return keys


_ABSENT: Mapping[Color, str] = {
    "logprob": "no token has the sampler's logprob",
    "advantage": "no gradient step has given an advantage",
    "ratio": "no token statistics: the trainer keeps them with keep_token_stats",
    "mask": "no token was sampled",
}


def _keys(color: Color, scale: float) -> Iterable[ColourKey]:
    match color:
        case "logprob":
            yield ColourKey("", "probability")
            for index, least in enumerate(_LEAST_PROBABILITIES):
                yield ColourKey(f"q{index}", f"≥ {least:g}" if least else "less")
        case "ratio":
            yield ColourKey("", "probability: trainer's / sampler's")
            for index in range(len(_RATIO_STEPS), 0, -1):
                yield ColourKey(f"n{index}", f"≤ {1 / _RATIO_STEPS[index - 1]:.3g}")
            yield ColourKey("z", "1")
            for index, least in enumerate(_RATIO_STEPS, start=1):
                yield ColourKey(f"p{index}", f"≥ {least:g}")
        case "advantage":
            yield ColourKey("", "advantage")
            bounds = [share * scale for share in (*_SHARES, 1.0)]
            for index in range(len(bounds), 0, -1):
                yield ColourKey(f"n{index}", f"to {-bounds[index - 1]:+.3g}")
            yield ColourKey("z", "0")
            for index, bound in enumerate(bounds, start=1):
                yield ColourKey(f"p{index}", f"to {bound:+.3g}")
        case "mask":
            yield ColourKey(_SAMPLED, "sampled")


def _css(token: TokenRow, color: Color, advantage: float | None, scale: float) -> str:
    if color == "none":
        return ""
    if not token.sampled:
        return _NOT_SAMPLED
    match color:
        case "mask":
            return _SAMPLED
        case "logprob":
            return "" if token.logprob is None else _of_probability(_probability(token.logprob))
        case "ratio":
            return "" if token.ratio is None else _of_ratio(token.ratio)
    own = own_advantage(token, advantage)
    return "" if own is None or not math.isfinite(own) else _of_advantage(own, scale)


def _probability(logprob: float) -> float:
    return math.exp(min(0.0, logprob))


def _of_probability(probability: float) -> str:
    return next(f"q{index}" for index, least in enumerate(_LEAST_PROBABILITIES) if probability >= least)


def _of_ratio(ratio: float) -> str:
    size = sum((ratio if ratio >= 1 else 1 / max(ratio, 1e-30)) >= least for least in _RATIO_STEPS)
    return f"{'p' if ratio >= 1 else 'n'}{size}" if size else "z"


def _of_advantage(advantage: float, scale: float) -> str:
    if not advantage or not scale:
        return "z"
    return f"{'p' if advantage > 0 else 'n'}{1 + bisect_left(_SHARES, abs(advantage) / scale)}"


def _title(index: int, token: TokenRow, advantage: float | None) -> str:
    """Return a token's numbers, each on its line."""
    own = own_advantage(token, advantage)
    facts = [f"token {index:,}, id {token.token_id}", None if token.sampled else "not sampled"]
    if token.sampled and token.logprob is not None:
        facts.append(f"logprob {number(token.logprob + 0.0, 4)}, probability {number(_probability(token.logprob), 3)}")
    facts.append(f"reward {number(token.reward, 4)}" if token.reward or token.sampled else None)
    facts.append(None if own is None else f"advantage {own:+.4g}")
    facts.append(None if token.ratio is None or not token.sampled else f"trainer / sampler {number(token.ratio, 4)}")
    return "\n".join(fact for fact in facts if fact)
