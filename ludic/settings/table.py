"""Settings: one table from the annotated fields of dataclasses, and one conversion for flags, files and Python.

    learning_rate: Annotated[float, Range(0, 1000, above=True)] = 1e-6
    \"""Peak learning rate of AdamW.\"""

Such a field is a flag with its help, a key of a TOML or JSON file, and an argument in Python; each refuses a bad value
in the same words. So is a parameter of a function, whose help is in the Args of its docstring. `make format` copies the
texts below fields into ludic/settings/setting_texts.json, which --help reads. Raises ConfigError.
Imports nothing slow, since `ludic COMMAND --help` reads the table.

A field may also be a dataclass, whose settings it adds, or a choice between dataclasses:

    objective: Reinforce | PpoClip = field(default_factory=Reinforce)

Each member of a choice has a class attribute `name`. The choice adds a setting `objective`, which is a name, and the
settings of all members. A file may hold them as a table: `[objective]` with `name` and the member's own settings.

And a field may be settings of another dataclass, overridden, each None unless given:

    run: Annotated[Mapping[str, Any], Overrides(RunConfig, "of_sampling", "None is the run's.")]

What else a setting is, such as whether a first page of --help shows it, is its `Role`, which stands on its field too.
Ranges are far above any sensible value, and below the values that overflow a column, a wait or a machine.
"""

import inspect
import json
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from importlib import resources
from types import NoneType, UnionType
from typing import Annotated, Any, ForwardRef, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ludic.base import SERVER_LOGIN, find_by_name
from ludic.errors import ConfigError, similar_names, unknown_name
from ludic.settings.renamed import GONE, RENAMED
from ludic.settings.values import (
    SCALARS,
    MisfitError,
    Origin,
    PartNames,
    Range,
    Role,
    annotations,
    check_url,
    check_utf8,
    describe,
    fit,
    found_text,
    plain_kinds,
    texts,
)

S = TypeVar("S")


# --- Annotations of fields -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Needs:
    """The setting that must not be None for this one to have an effect."""

    name: str


@dataclass(frozen=True, slots=True)
class Overrides:
    """Settings of another dataclass, which the annotated mapping overrides by name; see `overridden`."""

    owner: Any
    """Dataclass with the settings: their types, ranges and texts."""
    role: str
    """Role of those settings, a field of `Role`."""
    none: str
    """Sentence that says what a setting is that is not given, such as "None is the run's."."""


@dataclass(frozen=True, slots=True)
class WhenNone:
    """What None means, where an override's None means another thing: `WhenNone("samples from all")`."""

    words: str
    """End of a sentence that begins with None, without a full stop."""


@dataclass(frozen=True, slots=True)
class FromFlag:
    """Type that a flag gives a parameter of an operation that takes more in Python: `FromFlag(EngineConfig)`."""

    kind: Any


@dataclass(frozen=True, slots=True)
class Shown:
    """How the command line shows a field, such as `Annotated[str, Shown("ROOT", by_position=True)]`."""

    metavar: str
    """Name of the value in the help."""
    by_position: bool = False
    """Given by its position among the arguments, and in no file; without a flag unless `has_flag`."""
    has_flag: bool = False
    last: bool = False
    """By its position after all others, wherever its parameter stands."""
    is_repeated: bool = False
    """Whether its flag, of a list, may be given several times."""


PositiveCount = Annotated[int, Range(1, 10**9)]
CountOr0 = Annotated[int, Range(0, 10**9)]
Index = Annotated[int, Range(0, 2**63 - 1)]
"""A step or a policy version."""
Tokens = Annotated[int, Range(1, 10**8)]
Processes = Annotated[int, Range(1, 4096)]
Seed = Annotated[int, Range(-(2**63), 2**63 - 1)]
Seconds = Annotated[float, Range(0, 10**9, above=True)]
SecondsOfADay = Annotated[float, Range(0, 86_400, above=True)]
"""Seconds of one call or wait: more would hide that it hangs."""
Weight = Annotated[float, Range(0, 10**6, above=True)]
GroupSize = Annotated[int, Range(1, 10**5)]
"""request_index, the number of a group times group_size, fits int64 in all slots that num_workers share."""
GroupsPerBatch = Annotated[int, Range(1, 10**6)]
InFlight = Annotated[int, Range(1, 10**6)]
MaxBatch = Annotated[int, Range(1, 10**5)]
MaxSteps = Annotated[int, Range(1, 10**6)]
NumSamples = Annotated[int, Range(1, 10**5)]
Temperature = Annotated[float, Range(0, 100)]
TopP = Annotated[float, Range(0, 1, above=True)]
TensorParallel = Annotated[int, Range(1, 1024)]
GpuMemory = Annotated[float, Range(0, 1, above=True)]
Port = Annotated[int, Range(1, 65_535)]
StopWithin = Annotated[int, Range(1, 43_200)]
FormatReward = Annotated[float, Range(-(10**6), 10**6)]


# --- The table -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that a user can set."""

    field: str
    """Name of the dataclass's field."""
    kind: Any
    """Type of the field, with its annotations."""
    default: Any
    """MISSING if the setting must be given."""
    owner: Any
    """Dataclass or function with the field."""
    path: tuple[str, ...] = ()
    """Fields of the outer dataclasses that lead to the one with the field, or with `within`."""
    within: str = ""
    """Field of the choice that has the owner as a member, or of the owner's overrides."""
    members: tuple[Any, ...] = ()
    """Dataclasses of a choice: all of them if this is the choice's name, else those that have this setting."""
    note: str = ""
    """Sentence that follows the text below the field."""
    of_choice: Role | None = None
    """Role of the choice that has the owner as a member."""
    only_in_file: bool = False
    """Whether the command takes it from the file of --config alone, and not as a flag."""

    @property
    def name(self) -> str:
        """Name in files and Python; a field named like a Python keyword ends with an underscore, its setting not."""
        return self.field.rstrip("_")

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def help(self) -> str:
        """Text below the field, as one line."""
        helps = texts_of(self.owner)
        if self.field == "root":
            return helps.get("root") or helps.get(RUN) or "Folder or URL of the run."
        of_none = next((each.words for each in annotations(self.kind) if isinstance(each, WhenNone)), "")
        about_none = f"None {of_none}." if of_none and not self.is_override else ""
        return " ".join(filter(None, (helps.get(self.field), about_none, self.note)))

    @property
    def group(self) -> str:
        """Name of the innermost field that holds the setting's dataclass; "" for settings of the outermost one."""
        return self.path[-1] if self.path else ""

    @property
    def role(self) -> Role:
        own = next((each for each in annotations(self.kind) if isinstance(each, Role)), None)
        return own or self.of_choice or _NO_ROLE

    @property
    def shown(self) -> Shown | None:
        return next((each for each in annotations(self.kind) if isinstance(each, Shown)), None)

    @property
    def by_position(self) -> bool:
        return self.shown is not None and self.shown.by_position

    @property
    def has_flag(self) -> bool:
        return self.may_be_in_file and not self.only_in_file

    @property
    def may_be_in_file(self) -> bool:
        return not self.by_position or (self.shown is not None and self.shown.has_flag)

    @property
    def kinds(self) -> tuple[Any, ...]:
        """Types that the setting may have, without annotations."""
        return plain_kinds(self.kind)

    @property
    def is_switch(self) -> bool:
        """Whether flags without a value set it: --x and --no-x."""
        return bool in self.kinds

    @property
    def is_optional(self) -> bool:
        return NoneType in self.kinds

    @property
    def is_list(self) -> bool:
        """Whether its flag takes several values."""
        return any(get_origin(each) is tuple for each in self.kinds)

    @property
    def choices(self) -> tuple[Any, ...]:
        """Values of a Literal, or the names of the parts that it names; () if others are allowed."""
        if self.parts is not None:
            return tuple(self.parts.names())
        return tuple(each for kind in self.kinds if get_origin(kind) is Literal for each in get_args(kind))

    @property
    def parts(self) -> PartNames | None:
        """The kind of parts of which it names one."""
        return next((each for each in annotations(self.kind) if isinstance(each, PartNames)), None)

    @property
    def ranges(self) -> tuple[Range, ...]:
        return tuple(each for each in annotations(self.kind) if isinstance(each, Range))

    @property
    def needs(self) -> str:
        """Name of the setting that must not be None for this one to have an effect; "" if there is none."""
        return next((each.name for each in annotations(self.kind) if isinstance(each, Needs)), "")

    @property
    def is_choice(self) -> bool:
        """Whether it is the name of a member of a choice."""
        return bool(self.members) and not self.within

    @property
    def is_override(self) -> bool:
        """Whether it is one of overrides, kept in a mapping by its name."""
        return bool(self.within) and not self.members

    def why_unused(self, values: Mapping[str, Any]) -> str | None:
        """Return why the setting has no effect beside others, in words that follow its value; None if it has one.

        values: those of all other settings by name, with their defaults. A setting that they lack is not asked for.
        """
        if self.members and self.within and values[self.within] not in (names := [each.name for each in self.members]):
            chosen = values[self.within]
            return f"which {chosen} ignores; leave it out, or set {self.within} to {' or '.join(names)}"
        if self.needs in values and values[self.needs] is None:
            return f"but there is no {self.needs}; set {self.needs}, or leave it out"
        return None

    def convert(self, value: Any, what: str = "", source: "Origin" = "code") -> Any:
        """Return a value in the type of the field.

        what: names the setting in errors; "" is its name. Raises ConfigError if the value does not fit, or is a URL
        with a secret.
        """
        what = what or self.name
        for text in texts(value) if source != "stored" else ():
            check_url(text, what, _LOGINS.get(self.name))
        if self.parts is not None and source != "stored":
            check_utf8(value, what)
        try:
            found = fit(value, self.kind, source)
        except MisfitError as error:
            shown = found_text(value, source, is_number=error.is_number)
            raise ConfigError(f"{what} is {shown}, wanted {error.wanted or describe(self.kind, source)}") from None
        except ConfigError as error:  # of a part that is unknown
            where, colon, name = what.rpartition(": ")
            is_named = str(error).startswith(f"{name.lstrip('-')} ")
            raise type(error)(f"{where}{colon}{error}" if is_named else f"{what}: {error}") from None
        if source != "stored":
            check_utf8(found, what)
        return found


_NO_ROLE = Role()


def names_of(owner: Any, role: str) -> tuple[str, ...]:
    """Return the names of a dataclass's settings with a role, a field of `Role` that is true, in their order."""
    return tuple(each.name for each in settings_of(owner) if getattr(each.role, role))


def settings_of(owner: Any) -> tuple[Setting, ...]:
    """Return all settings of a dataclass, with those of the dataclasses in it; or those of a function.

    A function's are its parameters of types that a flag can give, a dataclass among them with all its settings. A
    parameter `run` is the setting `root`, the place of the run. Parameters that also are fields of its `**settings`
    are those fields.
    """
    return _settings_of(owner, ())


@cache
def _settings_of(owner: Any, path: tuple[str, ...]) -> tuple[Setting, ...]:
    if not isinstance(owner, type):
        return _settings_of_function(owner)
    hints = get_type_hints(owner, include_extras=True)
    found: list[Setting] = []
    for each in fields(owner):
        kind = hints[each.name]
        if isinstance(kind, type) and is_dataclass(kind):
            found += _settings_of(kind, (*path, each.name))
        elif overrides := next((one for one in annotations(kind) if isinstance(one, Overrides)), None):
            found += _overridden_settings(overrides, path, each.name)
        elif members := _members(kind):
            found += _settings_of_choice(Setting(each.name, kind, _default(each), owner, path, members=members))
        else:
            found.append(Setting(each.name, kind, _default(each), owner, path))
    return tuple(found)


def _members(kind: Any) -> tuple[Any, ...]:
    """Return the dataclasses of a choice; () for another type."""
    inner = plain_kinds(kind)
    return inner if len(inner) > 1 and all(isinstance(each, type) and is_dataclass(each) for each in inner) else ()


def _settings_of_choice(choice: Setting) -> Iterator[Setting]:
    """Yield the setting that names the member, and those of all members."""
    names = [each.name for each in choice.members]
    default = choice.default if choice.default is MISSING else choice.default.name
    kind: Any = Literal[*names]
    for each in annotations(choice.kind):
        kind = Annotated[kind, each]
    yield replace(choice, kind=kind, default=default)
    having: dict[str, list[Setting]] = {}
    for member in choice.members:
        for each in settings_of(member):
            having.setdefault(each.field, []).append(each)
    for first, *others in having.values():
        assert all((each.kind, each.default) == (first.kind, first.default) for each in others), f"one {first.name}"
        members = tuple(each.owner for each in (first, *others))
        note = _of_members([each.name for each in members], names)
        yield replace(first, path=choice.path, within=choice.field, members=members, note=note, of_choice=choice.role)


def _overridden_settings(overrides: Overrides, path: tuple[str, ...], field: str) -> Iterator[Setting]:
    for each in settings_of(overrides.owner):
        if not getattr(each.role, overrides.role):
            continue
        yield replace(
            each,
            kind=each.kind if each.is_optional else each.kind | None,
            default=None,
            path=path,
            within=field,
            note=overrides.none,
        )


def _of_members(having: Sequence[str], names: Sequence[str]) -> str:
    """Say in a sentence which members of a choice have a setting."""
    lacking = [name for name in names if name not in having]
    if not lacking:
        return ""
    start, listed = ("For", having) if len(having) <= len(lacking) else ("Not for", lacking)
    *firsts, last = listed
    return f"{start} {', '.join(firsts)} and {last}." if firsts else f"{start} {last}."


def _settings_of_function(function: Any) -> tuple[Setting, ...]:
    found: list[Setting] = []
    groups = groups_of(function)
    of_fields = [each for name, kind in groups.items() for each in _settings_of(kind, (name,))]
    names = {each.field for each in of_fields}
    of_parameters: list[Setting] = []
    for name, parameter in inspect.signature(function).parameters.items():
        kind, default = _kind_of(function, name), parameter.default
        if name == RUN and not takes_a_root(function):
            continue
        if name == RUN:
            has_words = any(isinstance(each, Shown) for each in annotations(kind))
            found.append(Setting("root", kind if has_words else ROOT, MISSING, function))
        elif kind is None or name in names or parameter.kind is parameter.VAR_KEYWORD:
            continue
        elif isinstance(kind, type) and is_dataclass(kind):
            of_parameters += () if kind in groups.values() else _settings_of(kind, (name,))
        elif parameter.kind is parameter.VAR_POSITIONAL:
            found.append(Setting(name, _many(kind), MISSING, function))
        else:
            found.append(Setting(name, kind, MISSING if default is parameter.empty else default, function))
    return tuple(sorted((*found, *of_fields, *of_parameters), key=lambda each: bool(each.shown and each.shown.last)))


def takes_a_root(function: Any) -> bool:
    """Return whether a function needs a run; False if it has no such parameter, or `run` may be None."""
    return RUN in inspect.signature(function).parameters and NoneType not in plain_kinds(_hint(function, RUN))


def opens_its_root(function: Any) -> bool:
    """Return whether a function's `run` may be the place of a run, which it opens or makes itself."""
    return _kind_of(function, RUN) is not None


def groups_of(function: Any) -> Mapping[str, type]:
    """Return the dataclasses whose settings a function takes by flat names, by the names of their groups."""
    return getattr(inspect.unwrap(function), _GROUPS, {})


def is_operation(function: Any) -> bool:
    """Return whether a function is an operation."""
    return hasattr(inspect.unwrap(function), _GROUPS)


def groups_in(function: Any) -> Mapping[str, type]:
    """Return all dataclasses among a function's settings, by the names of their groups."""
    kinds = {name: _kind_of(function, name) for name in inspect.signature(function).parameters if name != RUN}
    given = {name: kind for name, kind in kinds.items() if isinstance(kind, type) and is_dataclass(kind)}
    return {**given, **groups_of(function)}


RUN = "run"
"""Name of a function's parameter for an opened run, or for the place of one."""
ROOT = Annotated[str, Shown("ROOT", by_position=True)]
"""Type of a run's folder or URL, a positional argument."""


def _hint(function: Any, name: str) -> Any:
    """Return the annotation of a parameter; of one in quotes, for type checkers, the scalars in it."""
    hint = inspect.unwrap(function).__annotations__.get(name)
    if get_origin(hint) is Annotated and isinstance(get_args(hint)[0], ForwardRef):
        inner, *others = get_args(hint)
        return Annotated[(_quoted(inner.__forward_arg__), *others)]
    return _quoted(hint) if isinstance(hint, str) else hint


def _quoted(text: str) -> Any:
    """Return str | None for "Path | str | None"; None without a scalar."""
    named = {kind.__name__: kind for kind in SCALARS} | {"None": NoneType}
    kinds, before = [], ""
    for each in text.split(" | "):
        if each in named and before.count("[") == before.count("]"):  # not within dict[str, int | str]
            kinds.append(named[each])
        before += each
    return Union[tuple(kinds)] if kinds else None  # noqa: UP007


def _kind_of(function: Any, name: str) -> Any:
    """Return the type that a flag gives a parameter; None if no flag can."""
    hint = _hint(function, name)
    given = [each.kind for each in annotations(hint) if isinstance(each, FromFlag)]
    found = given[0] if given else _settable(hint)
    return None if found is NoneType else found


def _settable(kind: Any) -> Any:
    """Return those types of a union that a flag can give, or the one dataclass in it; None if there are none."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        found = _settable(inner[0])
        return None if found is None else Annotated[(found, *inner[1:])]
    if origin in (Union, UnionType):
        kinds = [found for found in map(_settable, inner) if found is not None]
        if one := [each for each in kinds if isinstance(each, type) and is_dataclass(each)]:
            return one[0]
        kinds.sort(key=lambda each: get_origin(each) is not tuple)  # a list may be given as one value, too
        return Union[tuple(kinds)] if any(each is not NoneType for each in kinds) else None  # noqa: UP007
    if origin is Sequence:
        found = _settable(inner[0])
        return None if found is None else _many(found)
    if origin in (Literal, tuple, Mapping) or kind in SCALARS or kind is NoneType or is_dataclass(kind):
        return kind
    return None


def _many(kind: Any) -> Any:
    """Return the type of many values of a type."""
    if get_origin(kind) is Annotated:
        inner, *annotations = get_args(kind)
        return Annotated[(_many(inner), *annotations)]
    return tuple.__class_getitem__((kind, ...))


@cache
def _own_settings(owner: Any) -> tuple[Setting, ...]:
    """Return the settings that are fields of the dataclass itself."""
    return tuple(each for each in settings_of(owner) if not each.path and not each.within)


@cache
def _own_overrides(owner: Any) -> Mapping[str, Mapping[str, Setting]]:
    """Return the settings that each field of the dataclass itself may override, by name."""
    found: dict[str, dict[str, Setting]] = {}
    for each in settings_of(owner):
        if each.is_override and not each.path:
            found.setdefault(each.within, {})[each.name] = each
    return found


@cache
def _needing(owner: Any) -> tuple[Setting, ...]:
    """Return the settings that need another one."""
    return tuple(each for each in settings_of(owner) if each.needs)


def _default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


TEXTS = "setting_texts.json"
"""File of the package with the texts below the fields of dataclasses, by the names of both; `make format` writes it."""


@cache
def texts_of(owner: Any) -> Mapping[str, str]:
    """Return the texts of the fields of a dataclass and of its bases, or the Args of a function's docstring."""
    if not isinstance(owner, type):
        return _helps_of_parameters(inspect.getdoc(owner) or "")
    return {
        name: text for base in reversed(owner.__mro__) for name, text in _all_texts().get(base.__name__, {}).items()
    }


@cache
def _all_texts() -> Mapping[str, Mapping[str, str]]:
    found: Mapping[str, Mapping[str, str]] = json.loads(
        (resources.files("ludic.settings") / TEXTS).read_text(encoding="utf-8")
    )
    return found


def forget_texts() -> None:
    """Read the file of texts anew, after it was written."""
    _all_texts.cache_clear()
    texts_of.cache_clear()


def _helps_of_parameters(docstring: str) -> dict[str, str]:
    helps: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(docstring.partition("Args:\n")[2]).splitlines():
        if line[:1].strip():
            name, _, line = line.partition(": ")
        helps[name] = f"{helps.get(name, '')} {line.strip()}".strip()
    return helps


# --- Conversion ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Given:
    """A value of a setting that was not written in Python."""

    value: Any
    what: str
    """Names the setting in errors, such as --num-steps, or a.toml: num_steps."""
    source: Origin


def given(values: Mapping[str, Any], where: str, source: Origin = "file") -> dict[str, Given]:
    """Return the values of one place. where: names it in errors, such as a file's name."""
    return {name: Given(value, f"{where}: {name}", source) for name, value in values.items()}


def convert(owner: Callable[..., S], values: Mapping[str, object], *, where: str = "") -> S:
    """Return the dataclass with these values by the names of its settings.

    values: plain ones, or `Given`. where: names their place in errors. Raises ConfigError for an unknown name and a
    value that does not fit, SettingsError for settings that are missing, contradict each other or have no effect.
    Stored values that have no effect beside the others are dropped, and those of settings that are gone.
    """
    given = arguments(owner, typed(owner, values, where=where))
    try:
        return owner(**given)
    except ConfigError as error:
        raise SettingsError(str(error)) from error


def typed(owner: Any, values: Mapping[str, object], *, where: str = "") -> dict[str, Any]:
    """Return the values in the types of their settings, by name; arguments and errors are those of `convert`."""
    table = {each.name: each for each in settings_of(owner)}
    values = {name: value for name, value in values.items() if name not in GONE or not _is_stored(value)}
    values = without_tables(values, table, where=where)
    refuse_unknown(values, table, where=where)
    found = {}
    for name, value in values.items():
        one = value if isinstance(value, Given) else Given(value, f"{where}{name}", "code")
        found[name] = table[name].convert(one.value, one.what, one.source)
    stored = {name for name, value in values.items() if _is_stored(value)}
    used = in_use(owner, found)
    return {name: value for name, value in found.items() if name in used or name not in stored}


def _is_stored(value: object) -> bool:
    return isinstance(value, Given) and value.source == "stored"


def without_tables(values: Mapping[str, Any], table: Mapping[str, Setting], *, where: str = "") -> dict[str, Any]:
    """Return the values with the table of a choice, or its member, as single settings.

    {"objective": {"name": "ppo_clip", "clip_high": 0.2}} becomes {"objective": "ppo_clip", "clip_high": 0.2}. table:
    settings by name. Raises ConfigError if a table has no name, or a key that is unknown or given beside it, too.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        one = value if isinstance(value, Given) else Given(value, f"{where}{name}", "code")
        choice = table.get(name)
        if choice is None or not choice.is_choice or not isinstance(one.value, (Mapping, *choice.members)):
            found[name] = value
            continue
        inside: Any = one.value
        if not isinstance(inside, Mapping):
            inside = {"name": inside.name, **flat(inside)}
        if "name" not in inside:
            raise ConfigError(f"{one.what} has no name, wanted name = {describe(choice.kind)}")
        own = [each for each in table.values() if each.within == choice.field]
        known = [each.name for each in own if inside["name"] in [member.name for member in each.members]]
        known = known or [each.name for each in own]  # of a name that is unknown itself
        refuse_unknown([key for key in inside if key != "name"], known, where=f"{one.what}: ")
        for key, each in inside.items():
            if key in values:
                raise ConfigError(f"{where}{key} is given twice, in the table {name} and beside it")
            inner = replace(one, value=each, what=f"{one.what}.{key}") if isinstance(value, Given) else each
            found[name if key == "name" else key] = inner
    return found


def in_use(owner: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, by name, without those that have no effect beside the others; names may be unknown."""
    table = {each.name: each for each in settings_of(owner)}
    known = {**{name: each.default for name, each in table.items()}, **values}
    return {name: each for name, each in values.items() if name not in table or not table[name].why_unused(known)}


def arguments(owner: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a dataclass or a function, with the dataclasses in it. values: from `typed`.

    Those of a function's `**settings` stay as they are, by their flat names. Raises MissingSettingsError, and
    SettingsError for settings that contradict each other, or have no effect and not their default.
    """
    if absent := missing(owner, values):
        raise MissingSettingsError([each.name for each in absent])
    groups = () if isinstance(owner, type) else groups_of(owner)
    flat_ones = {each.name for each in settings_of(owner) if each.path and each.path[0] in groups}
    nested: dict[tuple[str, ...], dict[str, Any]] = {}
    used = in_use(owner, values)
    _check_used([each for each in settings_of(owner) if each.name not in flat_ones], values)
    for each in settings_of(owner):
        if each.name in flat_ones:
            if each.name in values:
                nested.setdefault((), {})[each.name] = values[each.name]
        elif each.name in used:
            path = (*each.path, each.within) if each.within else each.path
            nested.setdefault(path, {})[each.field] = values[each.name]
    try:
        return _arguments(owner, nested, ())
    except ConfigError as error:
        raise SettingsError(str(error)) from error


class SettingsError(ConfigError):
    """Settings contradict each other, or some are missing; a command answers them as wrong usage."""

    exit_code = 2


class MissingSettingsError(SettingsError):
    """Settings that must be given are not."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"missing: {', '.join(names)}")
        self.names = names


def _check_used(table: Collection[Setting], values: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value that has no effect beside the others; one equal to its default counts as none."""
    known = {**{each.name: each.default for each in table}, **values}
    for each in table:
        if (why := each.why_unused(known)) and known[each.name] != each.default:
            raise SettingsError(f"{each.name} is {known[each.name]}, {why}")


def _arguments(
    owner: Any, nested: Mapping[tuple[str, ...], Mapping[str, Any]], path: tuple[str, ...]
) -> dict[str, Any]:
    if isinstance(owner, type):
        kinds = get_type_hints(owner)
    else:
        names = {each.path[0] for each in settings_of(owner) if each.path} - groups_of(owner).keys()
        kinds = {name: _kind_of(owner, name) for name in names}
    inner = {
        name: kind(**_arguments(kind, nested, (*path, name)))
        for name, kind in kinds.items()
        if isinstance(kind, type) and is_dataclass(kind)
    }
    own = dict(nested.get(path, {}))
    for field in _own_overrides(owner):
        own[field] = {name: each for name, each in nested.get((*path, field), {}).items() if each is not None}
    for each in _own_settings(owner):
        if each.is_choice and (each.field in own or (*path, each.field) in nested):
            name = own.get(each.field, each.default)
            member = next(member for member in each.members if member.name == name)
            own[each.field] = member(**nested.get((*path, each.field), {}))
    return inner | own


def missing(owner: Any, values: Collection[str]) -> list[Setting]:
    """Return the settings that must be given and are not; a function looks after those of its `**settings` itself."""
    absent = [each for each in settings_of(owner) if each.default is MISSING and each.name not in values]
    if isinstance(owner, type):
        return absent
    groups, parameters = groups_of(owner), inspect.signature(owner).parameters
    needed = {name for name, each in parameters.items() if each.default is each.empty}
    return [each for each in absent if not (each.path and each.path[0] in groups) or each.field in needed]


def check(settings: Any, *, urls: bool = True) -> None:
    """Check a dataclass in its __post_init__; dataclasses in it have checked themselves.

    urls: refuse URLs with secrets, which stored settings may hold. Raises ConfigError.
    """
    owner: Any = type(settings)
    for each in _own_settings(owner):
        value = getattr(settings, each.field)
        if each.is_choice:
            if not isinstance(value, each.members):
                names = ", ".join(member.__name__ for member in each.members)
                raise ConfigError(f"{each.name} is {value!r}, wanted one of the dataclasses {names}")
        elif value is not each.default:
            each.convert(value, source="code" if urls else "stored")
    for field, known in _own_overrides(owner).items():
        if not isinstance(getattr(settings, field), Mapping):
            raise ConfigError(f"{field} is {getattr(settings, field)!r}, wanted a mapping of settings by name")
        refuse_unknown(getattr(settings, field), known, where=f"{field}: ")
        for name, value in getattr(settings, field).items():
            known[name].convert(value, source="code" if urls else "stored")
    if needing := _needing(owner):
        _check_used(needing, flat(settings))


_GROUPS = "_groups"
"""Attribute of an operation: dataclasses by the names of their groups."""


def make_operation(function: Callable[..., Any], groups: Mapping[str, type]) -> None:
    """Mark a function as an operation (ludic.app.operations.operation) with these dataclasses of its `**settings`."""
    setattr(function, _GROUPS, groups)


def split(values: Mapping[str, object], **groups: type) -> dict[str, dict[str, Any]]:
    """Return flat settings by the names of the dataclasses that have them. Raises ConfigError for an unknown name."""
    found: dict[str, dict[str, Any]] = {name: {} for name in groups}
    known = {each.name: group for group, owner in groups.items() for each in settings_of(owner)}
    refuse_unknown(values, known)
    for name, value in values.items():
        found[known[name]][name] = value
    return found


def flat(settings: Any) -> dict[str, Any]:
    """Return a dataclass's settings by name, those of inner dataclasses too: `convert(cls, flat(x)) == x`.

    Of a choice, those of the chosen member.
    """
    values: dict[str, Any] = {}
    for each in settings_of(type(settings)):
        holder = settings
        for name in (*each.path, each.within) if each.within else each.path:
            holder = getattr(holder, name)
        if each.is_choice:
            values[each.name] = getattr(holder, each.field).name
        elif each.is_override:
            values[each.name] = holder.get(each.name)
        elif not each.within or isinstance(holder, each.members):
            values[each.name] = getattr(holder, each.field)
    return values


def overridden(settings: Any, names: Collection[str], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a dataclass by name, with those of `overrides` that are not None in their place."""
    return {name: getattr(settings, name) if overrides.get(name) is None else overrides[name] for name in names}


def unknown(name: str, known: Collection[str], what: str = "setting", algorithm: str | None = None) -> str:
    """Describe an unknown name with what it may mean: a setting of another program, a former or a similar name.

    algorithm: that of the run, which decides what a name of TRL's trainers means; None if it is not known.
    """
    if meaning := meaning_elsewhere(name, known, algorithm=algorithm):
        return f"{what} {name!r} is {meaning}"
    return unknown_name(
        what, name, known, close=close_names(name, known), elsewhere="docs/settings.md and `--help all` list them"
    )


_ELSEWHERE = "ludic.adapters.foreign_settings:answer"
"""Says what a setting of another program is here; it alone knows the names of other programs."""


def meaning_elsewhere(
    name: str, known: Collection[str], shown: Callable[[str], str] = str, algorithm: str | None = None
) -> str | None:
    """Return what an unknown name was in an older ludic, or is in another program, as the end of a message; else None.

    shown: how a setting of ludic is written, such as with hyphens as a flag.
    """
    if name in GONE and name not in known:
        return f"gone: {GONE[name].instead}"
    return find_by_name(_ELSEWHERE)(name, known, shown, algorithm)


def close_names(name: str, known: Collection[str]) -> list[str]:
    """Return the names that an unknown setting may mean, best first: its current name, else similar names."""
    current = RENAMED.get(name, name.replace("-", "_"))
    return [current] if current in known else similar_names(name, known)


def refuse_unknown(
    names: Iterable[str],
    known: Collection[str],
    *,
    what: str = "setting",
    where: str = "",
    algorithm: str | None = None,
) -> None:
    """Raise ConfigError if a name is not known; it answers all such names at once. where: a file, in errors."""
    refuse([unknown(name, known, what, algorithm) for name in names if name not in known], where=where)


def refuse(
    problems: Sequence[str],
    *,
    where: str = "",
    error: type[ConfigError] = ConfigError,
    what: str = "settings are unknown",
) -> None:
    """Raise an error of all problems at once: one is its message, several are a line each of its detail.

    what: the message of several problems, after their number.
    """
    if not problems:
        return
    if len(problems) == 1:
        raise error(f"{where}{problems[0]}")
    refused = error(f"{where}{len(problems)} {what}")
    refused.detail = "\n".join(problems)
    refused.add_note(refused.detail)
    raise refused


def check_names(names: Collection[str], owner: Any, what: str) -> None:
    """Check that a dataclass has settings of these names. what: such as "setting of a run". Raises ConfigError."""
    refuse_unknown(names, [each.name for each in settings_of(owner)], what=what)


def to_flags(values: Mapping[str, Any]) -> list[str]:
    """Return the flags that set these settings: ["--learning-rate", "0.003", "--no-resume", ...]."""
    return [part for name, value in values.items() for part in _to_flag(name.replace("_", "-"), value)]


def _to_flag(name: str, value: Any) -> Sequence[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list | tuple):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, Mapping) else str(value)]


_LOGINS = {
    "server_url": f"leave it out, and set {SERVER_LOGIN}=user:password where the workers run",
    "judge_url": "name the variable that holds the key in judge_key_env",
}
"""What to do about a secret in a URL, by setting."""


def check_urls(settings: Any) -> None:
    """Check that no value of a dataclass is a URL with a secret. Raises ConfigError, without the secret."""
    owner: Any = type(settings)
    for each in _own_settings(owner):
        for text in texts(getattr(settings, each.field)):
            check_url(text, each.name, _LOGINS.get(each.name))
