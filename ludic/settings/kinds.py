"""What a setting may name: the kinds of parts, those that ludic has, and how to bring your own.

    NAME                    a part of ludic: calculator
    NAME:ARGUMENT           a part of ludic that is made with an argument: tag:answer, window:8
    NAME                    a part that an installed package brings under an entry point (docs/environments.md)
    PREFIX/NAME             an environment of another package: reasoning_gym/leg_counting
    path/to/file.py:name    what has that name in a file of yours
    NAME:path/to/file.py:name    a part of ludic that is made with yours: json:moves.py:Move, trl:rewards.py:accuracy
    path/to/file.sql        SQL of yours

Each kind is one value below. To add a part to ludic, write it, and name it in its kind. Parts are imported when they
are used: their libraries take seconds, and those who produce episodes know nothing of those who train. SQL and
algorithms need no line here: a file in their folder is a part. Entry points are looked at only for a name that ludic
does not have.

Your own code runs only with consent if a root names it (ludic.settings.consent); the text that was read is what runs,
and a copy of it is kept in the root (ludic.run.code_snapshots).
"""

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import isfunction
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ludic.base import ENGINE as ANY_ENGINE
from ludic.base import (
    LUDIC,
    RECORDED_ENV,
    PackagedPart,
    find_by_name,
    local_path,
    name_and_version,
    packaged_names,
    packaged_parts,
    read_packaged,
)
from ludic.errors import ConfigError, LudicError, QueryError, unknown_name
from ludic.settings.user_code import describe, describe_failure, load_file, only_exceptions, training_starts_at
from ludic.settings.user_files import (
    COMMAND,
    MCP,
    NO_FILES,
    QUESTIONS,
    Files,
    UserFile,
    file_of,
    python_file_of,
    read_user_file,
)

SCORER_OPTIONS = ("scorer", "group_scorer")
"""Options of environments qa/SOURCE that may name users' functions."""
REWARD_MODEL, POOLING = "model:", "pooling:"
"""Prefixes of scorers that are reward models: of a folder or the Hub, and behind a server."""

_CLASS = "path/to/file.py:ClassName"
_FUNCTION = "path/to/file.py:function"
_SQL = "path/to/file.sql"
_INSTALLED_CLASS = "package.module:ClassName"
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
"""Matches the names that packages may give their parts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kind:
    """A kind of parts that settings name."""

    role: str
    """What such a part is called, in messages and in records of code."""
    built_in: Mapping[str, str | None] = field(default_factory=dict)
    """Parts of ludic by name: text module:attribute; None for a name that stands for no part. NAME:ARGUMENT stands for
    all such names; its attribute is a function of the argument."""
    entry_points: str = ""
    """Group of the entry points by which installed packages bring such parts; "" if they can't."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of parts of other packages, each with text module:attribute of what makes them."""
    folder: str | None = None
    """Folder of `room` with one file for each part."""
    room: str = "ludic.root.sql"
    suffix: str = ".sql"
    """Suffix of the files in the folder."""
    own: tuple[str, ...] = ()
    """Forms of users' own parts."""
    noun: str = "class or function"
    """What a user's file must have under the name in the setting."""
    fits: Callable[[Any], bool] = callable
    """Whether what a user's file has under the name may be such a part; who uses the part looks closer."""
    foreign: tuple[str, ...] = ()
    """Names, or beginnings of names, that stand for code which is not part of ludic."""
    source: str | None = None
    """Text module:function: returns (sha256, package and version, digests of other texts by name) of the code of a part
    that is no user's file, from its name and options. None: it is a part of ludic that depends on nothing else."""
    error: type[LudicError] = ConfigError
    instead: Mapping[str, str] = field(default_factory=dict)
    """What errors say of a name that people look for and no part has."""

    def names(self) -> list[str]:
        """Return the parts of ludic, those of a folder sorted; those with an argument as NAME:ARGUMENT."""
        return list(self.built_in) if self.folder is None else packaged_names(self.folder, self.room, self.suffix)

    def text(self, name: str) -> str | None:
        """Return the text of a part of ludic that is a file in its folder; None if it has none of this name."""
        if self.folder is None or name not in self.names():
            return None
        return read_packaged(self.folder, name, self.room, self.suffix)

    def check(self, name: str) -> None:
        """Check a name as the function `check` does: a setting whose type is Annotated[str, KIND] asks this."""
        check(self, name)

    def is_users(self, setting: str) -> bool:
        """Return whether a setting names code that is not part of ludic: a root may name it only with consent.

        The tool `python` counts, since it runs what the model writes; so does qa/SOURCE, since it copies a file of
        this machine into the root, question by question; an environment module:Class of an installed package; and
        what such a package brings under a name.
        """
        if file_of(setting) is not None or setting.startswith(self.foreign):
            return True
        return (_INSTALLED_CLASS in self.own and ":" in setting) or packaged_part(self, setting) is not None


ENVIRONMENT = Kind(
    role="environment",
    built_in={
        "addition": "ludic.environments.toys:Addition",
        "errands": "ludic.environments.toys:Errands",
        "guess_number": "ludic.environments.toys:GuessNumber",
        "moar_cats": "ludic.environments.moar_cats:MoarCats",
        "number_comparison": "ludic.environments.toys:NumberComparison",
        "opposites": "ludic.environments.toys:Opposites",
        "sequential_digits": "ludic.environments.toys:SequentialDigits",
        "tic_tac_toe": "ludic.environments.toys:TicTacToe",
        "tic_tac_toe_self_play": "ludic.environments.toys:TicTacToeSelfPlay",
        "word_problems": "ludic.environments.toys:WordProblems",
    },
    packages={
        "reasoning_gym/": "ludic.adapters.environments.reasoning_gym:FAMILY",
        "textarena/": "ludic.adapters.environments.textarena:FAMILY",
        "gymnasium/": "ludic.adapters.environments.gymnasium:FAMILY",
        "verifiers/": "ludic.adapters.environments.verifiers:FAMILY",
    },
    entry_points="ludic.environments",
    own=(_CLASS, _INSTALLED_CLASS),
    noun="class",
    foreign=(QUESTIONS, "verifiers/"),
    instead={
        RECORDED_ENV: "stands for that of a recorded run, which is in the program that was recorded; name one with "
        "--env"
    },
    source="ludic.environments.registry:source_of",
)
SCORER = Kind(
    role="scorer",
    built_in={
        "exact": "ludic.environments.qa:score_exact",
        "numeric": "ludic.environments.qa:score_numeric",
        "math": "ludic.environments.qa:score_math",
        "regex": "ludic.environments.qa:score_regex",
        f"trl:{_FUNCTION}": "ludic.adapters.scorers:Trl",
        f"verl:{_FUNCTION}": "ludic.adapters.scorers:Verl",
        f"{REWARD_MODEL}PATH_OR_ID": "ludic.adapters.reward_models:ModelScorer",
        f"{POOLING}URL": "ludic.adapters.reward_models:ServerScorer",
    },
    entry_points="ludic.scorers",
    own=(_FUNCTION,),
    noun="function",
    foreign=(POOLING,),
    source="ludic.adapters.reward_models:source_of",
)
"""Scorers of questions, of which each scores an answer. A server that a root names gets the rollouts' texts, and so may
only be named with consent."""
GROUP_SCORER = Kind(
    role="group_scorer",
    built_in={f"trl:{_FUNCTION}": "ludic.adapters.scorers:Trl"},
    own=(_FUNCTION,),
    noun="function",
)
ROLLOUT_SCORER = Kind(
    role="scorer",
    built_in={
        f"{REWARD_MODEL}PATH_OR_ID": "ludic.adapters.reward_models:of_model",
        f"{POOLING}URL": "ludic.adapters.reward_models:of_server",
    },
    own=(_FUNCTION,),
    noun="function",
)
"""Scorers of `ludic score`, of which each scores a stored rollout."""
PARSER = Kind(
    role="parser",
    built_in={
        "whole": "ludic.agents.parsers:Whole",
        "tag:NAME": "ludic.agents.parsers:tag",
        "boxed": "ludic.agents.parsers:Boxed",
        "json": "ludic.agents.parsers:JsonParser",
        "json:path/to/file.py:TypeName": "ludic.agents.parsers:typed_json",
        "regex:PATTERN": "ludic.agents.parsers:regex",
        "think": "ludic.agents.parsers:Think",
    },
    own=(_CLASS,),
)
CONTEXT = Kind(
    role="context",
    built_in={
        "full": "ludic.agents.contexts:Full",
        "no_thinking": "ludic.agents.contexts:NoThinking",
        "window:N": "ludic.agents.contexts:window",
        "summary:N": "ludic.agents.contexts:summary",
    },
    own=(_CLASS,),
)
TOOL = Kind(
    role="tool",
    built_in={
        "calculator": "ludic.agents.tools.calculator:calculator",
        "python": "ludic.agents.tools.interpreter:PythonInterpreter",
        f"{MCP}COMMAND": "ludic.agents.tools.mcp:McpServer",
        f"{MCP}https://ADDRESS": "ludic.agents.tools.mcp:McpServer",
    },
    own=(_FUNCTION,),
    noun="function or Tool",
    foreign=(MCP, "python"),
)
PROTOCOL = Kind(
    role="protocol",
    built_in={
        "single_agent": "ludic.agents.episode:single_agent",
        "several_agents": "ludic.agents.episode:several_agents",
    },
    own=(_FUNCTION,),
)
SUB_AGENT = Kind(role="sub-agent", built_in={"helper": "ludic.agents.delegation:helper"}, own=(_FUNCTION,))
AGENT = Kind(
    role="agent",
    built_in={name: f"ludic.rollouts.presets:{name.upper()}" for name in ("claude", "codex", "mini", "opencode", "pi")},
    own=(_FUNCTION,),
    noun="function",
    foreign=("claude", "codex", "mini", "opencode", "pi"),
    fits=lambda found: isfunction(found) or hasattr(found, "words"),
)
"""Agents that speak HTTP: a user's function, or a preset for a harness that is installed, which runs what the model
writes."""
AGENT_COMMAND = Kind(role="command", foreign=(COMMAND,))
"""Commands that run an agent or score its work, as command:WORDS; ludic has none, and each needs consent."""
ENGINE = Kind(
    role="engine",
    built_in={
        "transformers": "ludic.engines.transformers_engine:make_engine",
        "vllm": "ludic.engines.vllm_engine:make_engine",
        "server": "ludic.engines.server_engine:make_engine",
    },
    entry_points="ludic.engines",
    own=(_CLASS,),
    instead={ANY_ENGINE: "stands for the engine that this machine's device has"},
)
"""Never named by a root: the person who starts a worker names its engine."""
TOOL_FORMAT = Kind(
    role="tool format",
    # The last one would read JSON in the markup of the others, too.
    built_in={
        "hermes": "ludic.agents.tools.formats:HERMES",
        "qwen3_coder": "ludic.agents.tools.formats:QWEN3_CODER",
        "mistral": "ludic.agents.tools.formats:MISTRAL",
        "json": "ludic.agents.tools.formats:JSON",
        "json:TAG": "ludic.agents.tools.formats:json_in_tag",
        "llama": "ludic.agents.tools.formats:LLAMA",
    },
    fits=lambda found: callable(getattr(found, "parse", None)),
)
"""How model families write tool calls; json:TAG is calls in <TAG>...</TAG>."""
ALGORITHM = Kind(
    role="algorithm",
    folder="algorithms",
    room="ludic.training",
    suffix=".toml",
    instead={
        "ppo": "is unknown: ludic has no critic; grpo and reinforce_pp clip ratios as PPO does (docs/algorithms.md)"
    },
)
"""Settings of trainers by the names of their papers."""
OBJECTIVE = Kind(
    role="objective",
    built_in={
        name: f"ludic.training.losses:{name}"
        for name in (
            *("reinforce", "ppo_clip", "cispo", "gspo", "gmpo", "sapo", "dppo", "vespo"),
            *("sft", "dpo", "ipo", "orpo"),
        )
    },
)
"""Functions of a loss; the settings of each are a dataclass of the same name in ludic.training.config."""
TRACKER = Kind(
    role="tracker",
    built_in={
        "none": None,
        "tensorboard": "ludic.adapters.trackers:tensorboard",
        "wandb": "ludic.adapters.trackers:wandb",
        "mlflow": "ludic.adapters.trackers:mlflow",
        "trackio": "ludic.adapters.trackers:trackio",
    },
    entry_points="ludic.trackers",
)
"""Programs that show a run while it trains. A trainer keeps the tracker of the last one, which the root names."""
LAUNCHER = Kind(
    role="launcher",
    built_in={"local": "ludic.app.launch.local:launch_processes", "ray": "ludic.adapters.ray.launcher:launch"},
    entry_points="ludic.launchers",
)
CLUSTER_SYSTEM = Kind(
    role="cluster system",
    built_in={
        "slurm": "ludic.adapters.clusters.systems:SLURM",
        "kubernetes": "ludic.adapters.clusters.systems:KUBERNETES",
    },
    entry_points="ludic.cluster_systems",
    noun="ClusterSystem",
    fits=lambda found: callable(getattr(found, "files", None)),
)
EXPORTER = Kind(
    role="export format",
    built_in={
        "hf": "ludic.adapters.exports.weights:hf",
        "delta": "ludic.adapters.exports.tables:delta",
        "iceberg": "ludic.adapters.exports.tables:iceberg",
        "jsonl": "ludic.adapters.exports.text:export_text",
        "atif": "ludic.adapters.exports.trajectories:atif",
        "chat": "ludic.adapters.exports.trajectories:chat",
        "inspect": "ludic.adapters.exports.inspect_logs:inspect",
    },
    entry_points="ludic.exporters",
)
ADVANTAGE = Kind(
    role="advantage",
    folder="advantages",
    own=(_SQL, _FUNCTION),
    noun="function",
    fits=isfunction,
    error=QueryError,
)
FILTER = Kind(role="filter", folder="filters", own=(_SQL,), error=QueryError)
SELECTION = Kind(role="selection", folder="selections", own=(_SQL,), error=QueryError)
MEASURE = Kind(role="measure", folder="measures", own=(_SQL,), error=QueryError)
CONTAMINATION = Kind(role="query", folder="contamination", own=(_SQL,), error=QueryError)
FORMAT = Kind(
    role="format",
    built_in={
        name: f"ludic.adapters.imports.formats:{name.upper().replace('-', '_')}"
        for name in ("art", "atif", "inspect", "jsonl", "lighteval", "lm-eval", "prime-rl", "skyrl", "trl", "verl")
    },
    entry_points="ludic.formats",
    own=(_FUNCTION,),
    noun="function or Format",
    fits=lambda found: isfunction(getattr(found, "function", found)),
)
"""Formats of rollouts that other programs wrote."""

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        kind.role: kind
        for kind in (
            *(ENVIRONMENT, SCORER, GROUP_SCORER, PARSER, CONTEXT, TOOL, PROTOCOL, SUB_AGENT, ENGINE),
            *(AGENT, AGENT_COMMAND),
            *(ADVANTAGE, FILTER, SELECTION, MEASURE, CONTAMINATION, FORMAT),
            *(TOOL_FORMAT, ALGORITHM, OBJECTIVE, TRACKER, LAUNCHER, CLUSTER_SYSTEM, EXPORTER),
        )
    }
)
"""All kinds by role."""


def parser_stages(spec: str) -> list[str]:
    """Split a setting such as think|tag:answer into its stages; a regex takes the rest, so that it may contain |."""
    stages: list[str] = []
    rest: str | None = spec
    while rest is not None:
        rest = rest.lstrip()
        if rest.startswith("regex:"):
            return [*stages, rest]
        stage, bar, after = rest.partition("|")
        stages.append(stage.strip())
        rest = after if bar else None
    return stages


def own_code_of(kind: Kind, name: str) -> str | None:
    """Return the path/to/file.py:Name in a name, also that of json:path/to/file.py:Name; None if there is none."""
    own = name.partition(":")[2] if is_made_with_own(kind, name) else name
    return own if is_own(kind, own) else None


def is_made_with_own(kind: Kind, name: str) -> bool:
    """Return whether a name is of a part of ludic that is made with a users' part, such as trl:rewards.py:accuracy."""
    return ":" in name and any(".py:" in form and _head(form) == _head(name) for form in kind.built_in)


def takes_settings(kind: Kind, name: str) -> bool:
    """Return whether a scorer is made from settings of its own: a reward model, model:PATH or pooling:URL."""
    return ":" in name and _built_in(kind, name) is not None and not is_made_with_own(kind, name)


def scorer_names(option: Any) -> list[Any]:
    """Return the names in an option of SCORER_OPTIONS: one name, a list of names, or a mapping.

    The mapping is of names to weights, or of components to pairs of name and weight.
    """
    if isinstance(option, Mapping):
        return [each[0] if isinstance(each, list | tuple) and each else name for name, each in option.items()]
    return [option] if isinstance(option, str) else [*option] if isinstance(option, list | tuple) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """What a user's file has under the name in a setting."""

    value: Any
    """For a .sql file, its text."""
    file: UserFile


def find(kind: Kind, name: str, files: Files = NO_FILES) -> Any:
    """Return the part that a setting names; imports it if it is ludic's or a package's, and runs a user's file.

    For a part with an argument it is a function that takes no more positional arguments; for a part in SQL or TOML, its
    text; None for a name that stands for no part.
    files: users' files to use instead of those on disk, by path as in the name. Raises the kind's error if there is no
    such part, if a package's can't be imported, or if a user's file can't be read, fails, or has nothing of that name
    that can be such a part.
    """
    text = kind.text(name)
    if text is not None:
        return text
    built_in = _built_in(kind, name)
    if built_in is None:
        part = packaged_part(kind, name)
        return find_own(kind, name, files).value if part is None else _load(kind, part)
    attribute, arguments = built_in
    found: Any = None if attribute is None else find_by_name(attribute)
    return partial(found, *arguments) if arguments else found


def check(kind: Kind, name: str, files: Files = NO_FILES) -> None:
    """Check that there is such a part, as far as that can be seen without running or importing anything.

    Raises the kind's error for an unknown name, and for a user's file that can't be read or defines no such name.
    """
    if _built_in(kind, name) is not None or kind.text(name) is not None:
        return
    if packaged_part(kind, name) is not None:
        return
    if not is_own(kind, name):
        raise unknown(kind, name)
    file = _read(kind, name, files)
    if python_file_of(name) is None:
        return
    attribute = name.rpartition(":")[2]
    try:
        defined = _defined_names(ast.parse(file.source, str(file.path)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise kind.error(f"{kind.role} {name}: {error}") from error
    if attribute not in defined and "*" not in defined:  # of `from module import *`, nothing is known
        raise _missing(kind, name, [each for each in defined if not each.startswith("_")])


def find_own(kind: Kind, name: str, files: Files = NO_FILES) -> Own:
    """Return what a setting names in a user's file, and the file, which runs. Raises as `find` does."""
    if not is_own(kind, name):
        raise unknown(kind, name)
    file = _read(kind, name, files)
    if python_file_of(name) is None:
        try:
            return Own(value=file.source.decode(), file=file)
        except UnicodeDecodeError as error:
            raise kind.error(f"{kind.role} {name}: {error}") from error
    if (line := training_starts_at(file.source)) is not None:
        raise kind.error(
            f"{kind.role} {name}: {file.path}, line {line}, starts a training whenever the file is run, as workers do; "
            f'put the start below `if __name__ == "__main__":`, or {name.rpartition(":")[2]} into a file of its own'
        )
    try:
        module = load_file(file)
    except Exception as error:
        is_taken = file.shown_path != str(file.path)
        what = kind.role if is_taken else f"{kind.role} {name}"
        raise kind.error(f"{what}: {describe_failure(Path(file.shown_path), error)}") from error
    found = getattr(module, name.rpartition(":")[2], None)
    if not kind.fits(found):
        others = vars(module).items()
        raise _missing(kind, name, [key for key, each in others if kind.fits(each) and _is_of(module.__name__, each)])
    return Own(value=found, file=file)


def build_own(kind: Kind, name: str, make: Callable[[], Any], method: str) -> Any:
    """Call a user's class without arguments; its instance must have `method`. Raises the kind's error."""
    try:
        with only_exceptions():
            built = make()
    except Exception as error:
        raise kind.error(f"{kind.role} {name} could not be built without arguments: {describe(error)}") from error
    if not callable(getattr(built, method, None)):
        raise kind.error(
            f"{kind.role} {name}: {type(built).__name__} has no method {method!r}, which a {kind.role} needs"
        )
    return built


def unknown(
    kind: Kind, name: str, *, known: Iterable[str] | None = None, listed: Sequence[str] | None = None
) -> LudicError:
    """Return the error about a name that no part has. known, listed: as in errors.unknown_name, if not kind.names()."""
    if name in kind.instead:
        return kind.error(f"{kind.role} {name!r} {kind.instead[name]}")
    if name.endswith(".py") and any(".py:" in form for form in kind.own):
        return _unnamed(kind, name)
    names = kind.names()
    known, listed = names if known is None else known, names if listed is None else listed
    brought = list(dict.fromkeys(each.name for each in _packaged_parts(kind)))
    of_packages = [f"what a package brings as an entry point of {kind.entry_points}"] if kind.entry_points else []
    own = [*kind.own, *of_packages]
    return kind.error(unknown_name(kind.role, name, [*known, *brought], listed=[*listed, *brought], own=own))


# --- Parts that installed packages bring ------------------------------------------------------------------------------


def packaged_part(kind: Kind, name: str) -> PackagedPart | None:
    """Return the part that an installed package brings under a name; None if none does, or if the name is ludic's.

    Imports nothing, and looks at no entry point for a name of ludic. Raises the kind's error if two packages bring it,
    or if one brings a name that is ludic's or is none.
    """
    if not can_be_packaged(kind, name):
        return None
    found = [each for each in _packaged_parts(kind) if each.name == name]
    if len(found) > 1:
        packages = " and ".join(each.package for each in found)
        raise kind.error(f"{kind.role} {name!r} is brought by {packages}; uninstall one of them")
    return found[0] if found else None


def can_be_packaged(kind: Kind, name: str) -> bool:
    """Return whether a package may bring a part under a name: it is a plain one, and none of ludic's."""
    return bool(kind.entry_points) and name not in _taken(kind) and _PLAIN.fullmatch(name) is not None


def _taken(kind: Kind) -> set[str]:
    """Return the names that no package may give: those of ludic, and the first words of longer ones."""
    return {*map(_head, kind.names()), *(each.rstrip("/:") for each in (*kind.packages, *kind.foreign)), *kind.instead}


def _packaged_parts(kind: Kind) -> list[PackagedPart]:
    parts = packaged_parts(kind.entry_points) if kind.entry_points else []
    taken = _taken(kind)
    for each in parts:
        where = f"of the entry points {kind.entry_points!r}"
        if each.name in taken:
            raise kind.error(
                f"{kind.role} {each.name!r} is of {name_and_version(LUDIC) or LUDIC}, and {each.package} brings one of "
                f"the same name; rename it {where}, or uninstall {each.distribution}"
            )
        if not _PLAIN.fullmatch(each.name):
            raise kind.error(
                f"{kind.role} {each.name!r} of {each.package} is no name, wanted letters, digits, _ and -; rename it "
                f"{where}, or uninstall {each.distribution}"
            )
    return parts


def _load(kind: Kind, part: PackagedPart) -> Any:
    """Import a part of a package. Raises the kind's error if that fails, or if it can be no such part."""
    try:
        with only_exceptions():
            found = part.entry.load()
    except Exception as error:
        raise kind.error(
            f"{kind.role} {part.name!r} of {part.package} can't be imported ({part.entry.value}): {describe(error)}; "
            f"repair the package (pip install --force-reinstall {part.distribution}), or uninstall it"
        ) from error
    if not kind.fits(found):
        raise kind.error(f"{kind.role} {part.name!r} of {part.package} is {found!r}, wanted a {kind.noun}")
    return found


# --- Names -----------------------------------------------------------------------------------------------------------


def is_own(kind: Kind, name: str) -> bool:
    """Return whether a setting names a part in a user's file; regex:see a.py:7 does not, since it is a regex."""
    if _built_in(kind, name) is not None:
        return False
    if python_file_of(name) is not None:
        return any(".py:" in form for form in kind.own)
    return name.endswith(".sql") and _SQL in kind.own


def _built_in(kind: Kind, name: str) -> tuple[str | None, tuple[str, ...]] | None:
    """Return the text module:attribute of a part of ludic that is no file, and its argument; None if there is none."""
    head, colon, argument = name.partition(":")
    if not colon:
        return (kind.built_in[name], ()) if name in kind.built_in else None
    attributes = (kind.built_in[form] for form in kind.built_in if ":" in form and _head(form) == head)
    return next(((attribute, (argument,)) for attribute in attributes), None)


def _head(name: str) -> str:
    return name.partition(":")[0]


def _read(kind: Kind, name: str, files: Files) -> UserFile:
    path = file_of(name)
    assert path is not None
    try:
        return files[path] if path in files else read_user_file(local_path(path, f"the file of {kind.role} {name}"))
    except OSError as error:
        raise kind.error(f"{kind.role} {name}: {error}") from error


def _unnamed(kind: Kind, path: str) -> LudicError:
    """Return the error about a Python file of which no part is named; the file is read, and does not run."""
    form = next(form for form in kind.own if ".py:" in form)
    try:
        tree = ast.parse(read_user_file(local_path(path, f"the file of {kind.role} {path}")).source, path)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return kind.error(f"{kind.role} {path}: {error}; wanted {form}")
    wanted = ast.ClassDef if form == _CLASS else ast.FunctionDef | ast.AsyncFunctionDef
    names = [node.name for node in tree.body if isinstance(node, wanted) and not node.name.startswith("_")]
    what = "class" if form == _CLASS else "function"
    if not names:
        return kind.error(f"{kind.role} {path} names no {what}, and the file defines none; wanted {form}")
    return kind.error(
        f"{kind.role} {path} names no {what} of the file; write {' or '.join(f'{path}:{each}' for each in names)}"
    )


def _missing(kind: Kind, name: str, defined: list[str]) -> LudicError:
    path, _, attribute = name.rpartition(":")
    return kind.error(
        f"{kind.role} {name}: {path} has no {kind.noun} {attribute!r}; it has {', '.join(defined) or 'none at all'}"
    )


def _is_of(module: str, value: Any) -> bool:
    """Return whether a module defines a value, rather than imports it."""
    return not (isinstance(value, type) or isfunction(value)) or value.__module__ == module


def _defined_names(block: ast.AST) -> list[str]:
    """Return the names that a module defines or imports, also under `if` and `try`."""
    names: list[str] = []
    for node in ast.iter_child_nodes(block):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.append(node.name)
            case ast.Import() | ast.ImportFrom():
                names += [(alias.asname or alias.name).split(".")[0] for alias in node.names]
            case ast.Name(ctx=ast.Store()):
                names.append(node.id)
            case _:
                names += _defined_names(node)
    return names
