"""Arguments that look like flags, lists behind an equals sign, and what errors say of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from ludic.settings.flags import WrongUsageError, exit_with, help_of, read_flags
from ludic.settings.table import Range, Shown, settings_of


@dataclass(frozen=True, kw_only=True)
class Model:
    """How a model is kept."""

    rank: int = 1


@dataclass(frozen=True, kw_only=True)
class First:
    """What is trained."""

    model: str = "m"


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: Annotated[str, Shown("ROOT", by_position=True)]
    rate: Annotated[float, Range(-1, 1)] = 0.5
    where: str | None = None
    tools: tuple[str, ...] = ()
    betas: tuple[float, float] = (0.9, 0.95)
    options: Mapping[str, Any] = field(default_factory=dict)
    first: First = field(default_factory=First)
    model: Model = field(default_factory=Model)


@pytest.mark.parametrize(
    ("args", "given"),
    [
        (["r", "--rate", "-1e-3"], {"rate": -0.001}),
        (["r", "--rate", "-.5"], {"rate": -0.5}),
        (["r", "--rate=-1."], {"rate": -1.0}),
        (["r", "--where", "-1 < x"], {"where": "-1 < x"}),
        (["r", "--where", "-1<x"], {"where": "-1<x"}),
        (["r", "--tools=a", "b", "--rate", "0"], {"tools": ("a", "b"), "rate": 0.0}),
        (["r", "--tools", "-1<x", "b"], {"tools": ("-1<x", "b")}),
        (["r", "--betas=0.1", "0.2"], {"betas": (0.1, 0.2)}),
        (["--rate", "0", "r"], {"rate": 0.0}),
        (["--tools", "a", "--", "r"], {"tools": ("a",)}),
    ],
)
def test_values_that_begin_like_flags_and_lists_after_an_equals_sign(args: list[str], given: dict[str, Any]):
    assert read_flags(settings_of(Settings), args) == {"root": "r", **given}


@pytest.mark.parametrize("value", ["-inf", "-nan", "-1e3", "-2."])
def test_a_negative_number_out_of_range_is_named_as_one(value: str):
    with pytest.raises(WrongUsageError, match=f"^--rate is {value}, wanted"):
        read_flags(settings_of(Settings), ["r", "--rate", value])


@pytest.mark.parametrize(
    "args",
    [
        ["r", "--options", '{"a": {"url": "http://me:hunter2@host"}'],
        ["r", "s3://me:hunter2@bucket"],
    ],
)
def test_wrong_usage_shows_no_secret(args: list[str], capsys):
    with pytest.raises(WrongUsageError) as wrong:
        read_flags(settings_of(Settings), args)
    with pytest.raises(SystemExit):
        exit_with(wrong.value, "ludic run")
    assert "hunter2" not in capsys.readouterr().err


@pytest.mark.parametrize("args", [["--help", "--rank"], ["r", "--help", "rank"], ["r", "--rate", "x", "-h", "rank"]])
def test_help_wins_over_what_is_wrong_and_takes_a_flag(args: list[str]):
    assert read_flags(settings_of(Settings), args) == {"help": "rank"}


def test_a_topic_that_is_a_group_and_an_option_shows_both():
    text = help_of(settings_of(Settings), "model", "ludic run", "")
    assert "--model-of" not in text
    assert text.index("--model TEXT") < text.index("model: How a model is kept") < text.index("--rank INT")
    with pytest.raises(WrongUsageError, match="group or option 'zzz' is unknown; there are"):
        help_of(settings_of(Settings), "zzz", "ludic run", "")
