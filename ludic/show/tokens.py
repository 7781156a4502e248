"""Show tokens as readable text, coloured by their probability, advantage, ratio or mask.

Reads tokenizer.json of the newest published policy that has one; without a tokenizer, tokens are shown as ids.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from ludic.results import cell, number, plain_table, printable
from ludic.store import Root
from ludic.store.catalogue import WEIGHT_FILES

Color = Literal["logprob", "advantage", "ratio", "mask", "none"]
TokenReader = Callable[[Sequence[int]], list[str]]
"""Returns the text that each token adds."""

# Minimum probability and style, from likely to unlikely.
_SHADES = ((0.9, "green"), (0.5, "bright_green"), (0.1, "yellow"), (0.01, "bright_red"), (0.0, "bold red"))
# Minimum ratio of the probabilities under the trainer's and the sampler's weights, and style.
_RATIOS = ((1.2, "bold green"), (1.02, "green"), (0.98, "dim"), (0.8, "red"), (0.0, "bold red"))
_MASKED = "dim italic"
_SAMPLED = "bold"
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One token of a response."""

    token_id: int
    text: str
    logprob: float
    reward: float
    sampled: bool
    """False for tokens that the environment or a tool inserted."""
    ratio: float | None = None
    """Probability under the trainer's weights, as a multiple of the sampler's; None without token statistics."""
    advantage: float | None = None
    """Advantage of this token in training; None if the rollout has one for all."""


def load_token_reader(root: Root) -> TokenReader:
    """Return a reader with the run's newest tokenizer; without a tokenizer, it shows token ids."""
    found = [name for name in WEIGHT_FILES.listed(root) if name.file == "tokenizer.json"]
    if not found:
        return lambda token_ids: [f" {token_id}" for token_id in token_ids]
    tokenizer = Tokenizer.from_str(root.read(WEIGHT_FILES.name(max(found))).decode())
    return lambda token_ids: token_texts(lambda ids: tokenizer.decode(ids, skip_special_tokens=False), token_ids)


def token_texts(decode: Callable[[list[int]], str], token_ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; joined, they are the text of all tokens.

    Decoding tokens one by one would lose spaces between words, and characters that span several tokens. Such a
    character belongs to its last token.
    """
    texts: list[str] = []
    start = read = 0
    for end in range(1, len(token_ids) + 1):
        before, now = decode(list(token_ids[start:read])), decode(list(token_ids[start:end]))
        if len(now) <= len(before) or (now.endswith(_UNFINISHED) and end < len(token_ids)):
            texts.append("")
            continue
        texts.append(now[len(before) :])
        start, read = read, end
    return texts


def token_rows(row: dict[str, Any], reader: TokenReader, start: int, end: int) -> list[TokenRow]:
    """Return tokens start to end of a row's response. The row may have lists of `ratios` and `token_advantages`."""
    token_ids = row["response_tokens"][start:end]
    columns = (
        token_ids,
        reader(token_ids),
        row["response_logprobs"][start:end],
        row["token_rewards"][start:end],
        row["action_mask"][start:end] if row["action_mask"] else [True] * len(token_ids),
        *(_padded(row.get(name), start, end) for name in ("ratios", "token_advantages")),
    )
    return [TokenRow(*values) for values in zip(*columns, strict=True)]


def _padded(values: Sequence[float] | None, start: int, end: int) -> list[float | None]:
    """Return items start to end; None for those that are missing, since max_seq_len may cut a response in training."""
    found = list((values or ())[start:end])
    return [*found, *[None] * (end - start - len(found))]


def coloured(tokens: Sequence[TokenRow], color: Color, advantage: float | None) -> Text:
    """Return the response as text with one style per token."""
    text = Text()
    for token in tokens:
        text.append(printable(token.text), style=_style(token, color, advantage))
    return text


def colour_legend(color: Color, advantage: float | None) -> Text:
    """Return a legend of the colours."""
    text = Text("")
    match color:
        case "logprob":
            text.append("probability ")
            for least, style in _SHADES:
                text.append(f" ≥ {least:g} " if least else " less ", style=style)
        case "advantage" if advantage is not None:
            text.append(f"advantage {advantage:+.6g}", style=_advantage_style(advantage))
        case "advantage":
            text.append("without an advantage")
        case "ratio":
            text.append("trainer / sampler ")
            for least, style in _RATIOS:
                text.append(f" ≥ {least:g} " if least else " less ", style=style)
            text.append("  not in token_stats", style="")
        case "mask":
            text.append("sampled", style=_SAMPLED)
    return text.append("  not sampled", style=_MASKED) if color != "none" else text


def token_table(tokens: Sequence[TokenRow]) -> Table:
    """Return a table with one line per token."""
    table = plain_table(">index", ">id", "text", ">logprob", ">probability", ">reward", "sampled")
    for index, token in enumerate(tokens):
        table.add_row(
            str(index),
            str(token.token_id),
            cell(repr(token.text)),
            number(token.logprob, 4) if token.sampled else "-",
            number(math.exp(token.logprob), 3) if token.sampled else "-",
            number(token.reward, 4),
            "yes" if token.sampled else "no",
        )
    return table


def _style(token: TokenRow, color: Color, advantage: float | None) -> str:
    if color == "none":
        return ""
    if not token.sampled:
        return _MASKED
    if color == "mask":
        return _SAMPLED
    if color == "ratio":
        return "" if token.ratio is None else next(style for least, style in _RATIOS if token.ratio >= least)
    if color == "advantage":
        own = advantage if token.advantage is None else token.advantage
        return "" if own is None else _advantage_style(own)
    return next(style for least, style in _SHADES if math.exp(token.logprob) >= least)


def _advantage_style(advantage: float) -> str:
    return "green" if advantage > 0 else "red" if advantage < 0 else "dim"
