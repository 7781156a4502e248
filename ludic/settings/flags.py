"""Flags of a table of settings (ludic.settings), read by argparse, and their --help.

argparse splits the arguments. The conversion of texts, the places of positional arguments and the layout of the help
follow from the table. Raises WrongUsageError for wrong flags.
"""

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

from ludic.base import mask
from ludic.base.printable import printable
from ludic.errors import DETAIL_INDENT, ConfigError
from ludic.settings.table import (
    Setting,
    arguments,
    close_names,
    describe,
    meaning_elsewhere,
    missing,
    refuse,
    settings_of,
    unknown,
)

_FLAG = re.compile(r"(--?[A-Za-z][\w-]*)(=.*)?$", re.DOTALL)
"""Matches an argument that can only be a flag."""
_DOTTED = re.compile(r"(?:--|\+{1,2}|~)?([A-Za-z_][\w-]*(?:\.[\w-]+)+)(?:=(.*))?", re.DOTALL)
"""Matches a setting as other programs take it: actor_rollout_ref.rollout.n=8, --trainer.optim.lr."""
_NOT_A_FLAG = "\0"
"""Put before a value that begins with a hyphen, so that argparse takes it for no flag. No argument holds it."""
_ONCE = ("config", "algorithm")
"""Flags that decide about others, and so may be given once."""


class WrongUsageError(ConfigError):
    """Wrong flags; a command answers them with exit code 2."""


def run_script(
    function: Callable[..., object], args: Sequence[str] | None = None, *, description: str | None = None
) -> None:
    """Call a script's main function with its parameters from flags.

    args: None takes those of this process. description: for --help, which shows its first line; None takes that of the
    function. Prints help and exits; wrong usage prints the mistake and exits with 2.
    """
    program = Path(sys.argv[0]).name
    try:
        table = settings_of(function)
        flags = read_flags(table, sys.argv[1:] if args is None else args, has_config=False)
        if "help" in flags:
            text = (description or function.__doc__ or "").strip().partition("\n")[0]
            print(help_of(table, flags["help"], program, text))
            sys.exit(0)
        check_not_missing(function, flags, program)
        kwargs = arguments(function, flags)
    except ConfigError as error:
        exit_with(error, program)
    function(**kwargs)


def exit_with(error: ConfigError, program: str) -> NoReturn:
    """Print wrong usage in one line, with what to do, or a line for each of several mistakes; exit with 2."""
    hint = "" if "; " in str(error) else f"; `{program} --help` lists the options"
    detail = f"\n{textwrap.indent(error.detail, DETAIL_INDENT)}" if error.detail else ""
    print(printable(mask(f"ludic: {error}{hint}{detail}")), file=sys.stderr)
    sys.exit(2)


def check_not_missing(owner: Any, given: Collection[str], program: str) -> None:
    """Check that all is given that must be. Raises WrongUsageError, which names positional arguments and flags."""
    if absent := missing(owner, given):
        if any(each.name == "root" for each in absent):  # then no root says the rest
            absent = [each for each in settings_of(owner) if each.default is MISSING and each.name not in given]
        raise WrongUsageError(missing_text(absent, settings_of(owner), program))


def missing_text(absent: Sequence[Setting], table: Collection[Setting], program: str) -> str:
    """Name settings that are missing, as they are typed."""
    usage = _usage(program, [each for each in table if each.by_position])
    place = f"; ROOT comes first: {usage}" if "root" in {each.name for each in absent} else ""
    return f"missing: {', '.join(map(_as_typed, absent))}{place}"


# --- Flags ---------------------------------------------------------------------------------------------------------


def read_flags(settings: Collection[Setting], args: Sequence[str], *, has_config: bool = True) -> dict[str, Any]:
    """Return the settings that arguments give, by name, each in its type, and the text of `config`; or `help` alone.

    has_config: whether --config names a file. Raises WrongUsageError.
    """
    table = {each.name: each for each in settings}
    known = {each.flag[2:] for each in table.values() if each.has_flag} | {"help", *(["config"] if has_config else [])}
    args = _with_known_flags(args, table, known)
    try:
        found, others = _parser(table.values()).parse_known_args(args)
    except argparse.ArgumentError as error:
        raise WrongUsageError(_explain(error, table)) from None
    values = {name: _as_given(value) for name, value in vars(found).items()}
    others = _as_given(others)
    for name in set(_ONCE) & values.keys():
        if len(values[name]) > 1:
            raise ConfigError(f"--{name} is given twice")
        values[name] = values[name][0]
    positions = [each for each in table.values() if each.by_position]
    if "--" in others:
        others.remove("--")
    if "help" in values:
        return {"help": values["help"]}
    placed = _place(others, positions)
    for name, texts in placed.items():  # a list may be given both ways
        if name in values and not table[name].is_list:
            raise WrongUsageError(f"{_as_typed(table[name])} and --{name} are both given; leave out one of them")
        values[name] = [*texts, *values[name]] if name in values else texts
    own = {"config": values.pop("config")} if values.keys() - table.keys() else {}
    try:
        return own | {name: table[name].convert(text, _as_typed(table[name]), "flag") for name, text in values.items()}
    except ConfigError as error:
        raise WrongUsageError(str(error)) from error


def _as_typed(each: Setting) -> str:
    """Return the name of a setting on the command line: ROOT, --num-steps."""
    return each.shown.metavar if each.shown is not None and each.by_position else each.flag


def _with_known_flags(args: Sequence[str], table: Mapping[str, Setting], known: Collection[str]) -> list[str]:
    """Return the arguments with flags as the parser knows them, with hyphens. Refuses all flags that are not known."""
    switches = {f"no-{each.flag[2:]}" for each in table.values() if each.is_switch and each.has_flag}
    lists = {each.flag[2:] for each in table.values() if each.is_list}
    found: list[str] = []
    problems: list[str] = []
    algorithm = _algorithm_in(args)
    end = args.index("--") if "--" in args else len(args)
    for arg in args[:end]:
        match = _FLAG.match(arg)
        if meaning := answer_word(arg, table, algorithm):
            problems.append(f"{arg.partition('=')[0]} is {meaning}")
            continue
        if match is None or arg.lower() in ("-inf", "-nan"):
            found.append(_value(arg))
            continue
        if arg == "-h":
            found.append(arg)
            continue
        name = match[1].lstrip("-").replace("_", "-")
        if found[-1:] in (["-h"], ["--help"]):  # --help --learning-rate
            found.append(name)
            continue
        if not arg.startswith("--") or name not in {*known, *switches}:
            problems.append(_unknown_flag(match[1], name, table, known, algorithm))
        elif match[2] and name in lists:  # --betas=0.9 0.95
            found += [f"--{name}", _value(match[2][1:])]
        else:
            found.append(f"--{name}{match[2] or ''}")
    refuse(problems, error=WrongUsageError)
    return [*found, *args[end:]]


def _unknown_flag(
    given: str, name: str, table: Mapping[str, Setting], known: Collection[str], algorithm: str | None
) -> str:
    """Describe a flag that is not known. given: with its hyphens. name: with hyphens alone inside."""
    bare = name.removeprefix("no-").replace("-", "_")
    if bare in table and table[bare].only_in_file:
        return f"{given} is no option of this command; put it into the file of --config"
    meaning = meaning_elsewhere(bare, table, _flag, algorithm)
    if meaning and name not in known:  # -n is a mistake for --n where there is one
        return f"{given} is {meaning}"
    return f"there is no option {given}{_did_you_mean(name, known)}"


def answer_word(word: str, known: Collection[str], algorithm: str | None = None) -> str | None:
    """Return what an argument such as actor.lr=1e-6 or --trainer.optim.lr is here; None for any other word."""
    match = _DOTTED.fullmatch(word)
    if match is None or (match[2] is None and not word.startswith("--")):
        return None
    return meaning_elsewhere(match[1].replace("-", "_"), known, _flag, algorithm)


def _algorithm_in(args: Sequence[str]) -> str | None:
    """Return the value of --algorithm; None without one."""
    texts = [after for arg, after in pairwise([*args, ""]) if arg == "--algorithm"]
    texts += [arg.partition("=")[2] for arg in args if arg.startswith("--algorithm=")]
    return next(iter(texts), None)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _value(arg: str) -> str:
    return f"{_NOT_A_FLAG}{arg}" if arg.startswith("-") else arg


def _as_given(value: Any) -> Any:
    """Return an argument, or a list of them, as it was given."""
    if isinstance(value, list):
        return [_as_given(each) for each in value]
    return value.removeprefix(_NOT_A_FLAG) if isinstance(value, str) else value


def _did_you_mean(name: str, known: Collection[str]) -> str:
    bare = name.removeprefix("no-")
    close = close_names(bare.replace("-", "_"), [each.replace("-", "_") for each in known])
    prefix = "no-" if name.startswith("no-") else ""
    return f"; did you mean --{prefix}{close[0].replace('_', '-')}?" if close else ""


def _parser(table: Collection[Setting]) -> argparse.ArgumentParser:
    """Return the parser of all flags. It leaves positional arguments, and the conversion of texts, to us."""
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("-h", "--help", nargs="?", const="")
    parser.add_argument("--config", action="append")
    for each in table:
        if not each.has_flag:
            continue
        if each.is_switch:
            no_value: dict[str, Any] = {"action": "store_const"}
            # None needs a value: --keep-sampling-mask None.
            yes = {"nargs": "?"} if each.is_optional else no_value
            parser.add_argument(each.flag, dest=each.name, const="true", **yes)
            parser.add_argument(f"--no-{each.flag[2:]}", dest=each.name, const="false", **no_value)
        elif each.name in _ONCE:
            parser.add_argument(each.flag, dest=each.name, action="append")
        else:
            many: dict[str, Any] = {"nargs": "*"} if each.is_list else {}
            if each.shown is not None and each.shown.is_repeated:
                many["action"] = "extend"
            parser.add_argument(each.flag, dest=each.name, **many)
    return parser


def _explain(error: argparse.ArgumentError, table: Mapping[str, Setting]) -> str:
    flag = (error.argument_name or "").rpartition("/")[2]
    name = flag.removeprefix("--").replace("-", "_")
    each = table.get(name)
    if each is not None and not each.is_switch:
        return f"{flag} needs a value: {describe(each.kind, 'flag')}"
    if name == "config":
        return "--config needs a value: a TOML file"
    return f"{flag} takes no value"


def _place(texts: Sequence[str], positions: Sequence[Setting]) -> dict[str, Any]:
    """Return the values of positional settings; a list among them takes what the others leave."""
    lists = [index for index, each in enumerate(positions) if each.is_list]
    first = lists[0] if lists else len(positions)
    before, after = positions[:first], positions[first + 1 :]
    values: dict[str, Any] = {each.name: text for each, text in zip(before, texts, strict=False)}
    rest = list(texts[len(before) :])
    for each in reversed(after):
        if rest:
            values[each.name] = rest.pop()
    if rest and not lists:
        raise WrongUsageError(f"{rest[0]!r} is one argument too many")
    return values | ({positions[first].name: rest} if rest else {})


# --- Help ------------------------------------------------------------------------------------------------------------

ALL = "all"
"""Topic of --help that shows every option."""
MOST_LISTED = 30
"""Options of a command that --help lists at once; of one with more it lists the first ones, and names the groups."""
_INDENT = 30
"""Column at which texts begin."""
_WIDEST = 120
_KINDS: Mapping[Any, str] = {str: "TEXT", int: "INT", float: "FLOAT", Path: "PATH"}


def help_of(table: Collection[Setting], topic: str, program: str, description: str) -> str:
    """Return the help of a command.

    topic: a group, a setting, "all", or "" for the first page, which has the settings with that role if there are many.
    Raises WrongUsageError for an unknown topic.
    """
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    positions = [each for each in table if each.by_position]
    options = [each for each in table if each.has_flag]
    groups: dict[str, list[Setting]] = {}
    for each in options:
        groups.setdefault(each.group, []).append(each)
    # What must be given comes first, then the settings of no group.
    required = {name: any(each.default is MISSING for each in settings) for name, settings in groups.items()}
    groups = {name: groups[name] for name in sorted(groups, key=lambda name: (not required[name], bool(name)))}
    lines = [f"usage: {_usage(program, positions)}"]
    topic = topic.removeprefix("--").replace("-", "_")
    found = [each for each in options if each.name == topic]
    if topic in ("", ALL):
        lines += ["", *textwrap.wrap(description, width), ""]
        for each in positions:
            lines += _entry(_positional(each), each.help, width)
        lines += [""] if positions else []
        is_short = topic == "" and len(options) > MOST_LISTED
        if is_short:
            lines += _first_page(options, groups, program, width)
        else:
            for name, settings in groups.items():
                lines += _section(_title(name, settings), settings, width)
    elif topic in groups or found:
        lines += ["", *_section("", found, width)]
        lines += _section(_title(topic, groups[topic]), groups[topic], width) if topic in groups else ()
    else:
        raise WrongUsageError(unknown(topic, [*filter(None, groups), ALL], "group or option"))
    return "\n".join(lines).rstrip()


def _first_page(
    options: Sequence[Setting],
    groups: Mapping[str, Sequence[Setting]],
    program: str,
    width: int,
) -> Iterator[str]:
    """Yield the options that most calls need, and what the groups are about."""
    yield from _section("first options:", first_options(options), width)
    yield "more options, in groups:"
    for name, settings in groups.items():
        if name:
            yield from _entry(f"--help {name}", f"{about(settings)} ({len(settings)})", width)
        else:
            named = ", ".join(each.flag for each in settings if not each.role.first_page)
            yield from _entry("others", named, width) if named else ()
    yield ""
    yield from textwrap.wrap(
        f"`{program} --help GROUP` lists a group, `{program} --help OPTION` explains one option, "
        f"`{program} --help {ALL}` lists all {len(options)}.",
        width,
    )


def first_options(options: Sequence[Setting]) -> list[Setting]:
    """Return the options of the first page: the run's before the trainer's, as a table of settings has them."""
    return [each for each in options if each.role.first_page]


def _usage(program: str, positions: Sequence[Setting]) -> str:
    return " ".join([program, *map(_positional, positions), "[OPTIONS]"])


def _positional(each: Setting) -> str:
    """Return ROOT; FILE ... for a list; [ROOT ...] for one that may be empty."""
    assert each.shown is not None
    name = f"{each.shown.metavar} ..." if each.is_list else each.shown.metavar
    return name if each.default is MISSING or not each.is_list else f"[{name}]"


def _title(name: str, settings: Sequence[Setting]) -> str:
    return f"{name}: {about(settings)}" if name else "options:"


def about(settings: Sequence[Setting]) -> str:
    """Return the first sentence about the dataclass of a group."""
    text = " ".join((settings[0].owner.__doc__ or "").split("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".")


def _section(title: str, settings: Sequence[Setting], width: int) -> Iterator[str]:
    if not settings:
        return
    if title:
        yield from textwrap.wrap(title, width)
    for each in settings:
        yield from _entry(_label(each), _text(each), width)
    yield ""


def _entry(label: str, text: str, width: int) -> Iterator[str]:
    """Yield the lines of a label and its text beside it; a long label has a line of its own."""
    lines = textwrap.wrap(text, max(width - _INDENT, 20), break_long_words=False, break_on_hyphens=False) or [""]
    if len(label) > _INDENT - 4:
        yield from textwrap.wrap(
            label,
            width,
            initial_indent="  ",
            subsequent_indent=" " * 6,
            break_on_hyphens=False,
        )
    else:
        yield f"  {label:<{_INDENT - 2}}{lines.pop(0)}".rstrip()
    yield from (f"{' ' * _INDENT}{line}" for line in lines)


def _label(each: Setting) -> str:
    """Return a setting as it is typed: --betas FLOAT FLOAT; --resume, --no-resume."""
    if each.is_switch:
        return f"{each.flag}, --no-{each.flag[2:]}"
    return f"{each.flag} {metavar(each)}"


def metavar(each: Setting) -> str:
    """Return the value of a flag in the help: INT, {a,b}, [TEXT ...]."""
    if each.shown is not None:
        name = each.shown.metavar.replace(",", ", ") if each.shown.metavar.startswith("{") else each.shown.metavar
        return f"[{name} ...]" if each.is_list else name
    if each.parts is not None:
        return f"{{{', '.join(each.choices)}}}"
    return next(filter(None, map(_metavar, each.kinds)), "VALUE")


def _metavar(kind: Any) -> str:
    inner = get_args(kind)
    if get_origin(kind) is tuple:
        name = _metavar(inner[0])
        return f"[{name} ...]" if inner[-1] is ... else " ".join([name] * len(inner))
    if hasattr(kind, "__metadata__"):
        return _metavar(inner[0])
    if get_origin(kind) is not None:
        return f"{{{','.join(map(str, inner))}}}" if get_origin(kind).__name__ != "Mapping" else "JSON"
    return _KINDS.get(kind, "")


def _text(each: Setting) -> str:
    """Return the setting's text, with its default."""
    if each.default is MISSING:
        return f"{each.help} (required)"
    return f"{each.help} (default: {default_text(each)})"


def default_text(each: Setting) -> str:
    """Return a default as a person would type it."""
    if isinstance(each.default, bool):
        return "on" if each.default else "off"
    if isinstance(each.default, tuple):
        return " ".join(map(str, each.default)) or "empty"
    return str(each.default)
