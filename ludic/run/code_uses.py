"""The code that the settings of a run name: what workers sample and score with."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ludic.run.config import RunConfig
from ludic.settings import (
    AGENT,
    AGENT_COMMAND,
    COMMAND,
    PARSER,
    SCORER,
    SCORER_OPTIONS,
    CodeUse,
    file_of,
    own_code_of,
    packaged_part,
    parser_stages,
    scorer_names,
    takes_settings,
)
from ludic.settings.kinds import QUESTIONS


def sampling_uses(run: RunConfig, of_root: RunConfig | None = None) -> list[CodeUse]:
    """Return the code that workers sample and score with, each once: environments, tools, and users' other code.

    of_root: settings in the root, None if they are `run`; the user named the code that these do not name.
    """
    if of_root is not None:
        named = sampling_uses(of_root)
        return [use if use in named else replace(use, named_by_root=False) for use in sampling_uses(run)]
    environments = [
        CodeUse(role="environment", setting=name, options=run.env_options.get(name, {}))
        for name in dict.fromkeys(run.env)
    ]
    scorers = [CodeUse(role="scorer", setting=name, options=options) for name, options in _scorers(run).items()]
    tools = [CodeUse(role="tool", setting=name) for name in dict.fromkeys(run.tools)]
    in_stages = [own_code_of(PARSER, stage) for stage in parser_stages(run.parser)]
    parsers = [CodeUse(role="parser", setting=own) for own in in_stages if own]
    others: list[tuple[str, str]] = [("context", run.context), ("protocol", run.protocol or "")]
    others += [("sub-agent", name) for name in run.sub_agents]
    named = [CodeUse(role=role, setting=setting) for role, setting in dict.fromkeys(others) if file_of(setting)]
    agents = [CodeUse(role=AGENT.role, setting=run.agent)] if run.agent else []
    commands = [f"{COMMAND}{each}" for each in (run.agent_command, run.score_command) if each]
    agents += [CodeUse(role=AGENT_COMMAND.role, setting=each) for each in commands]
    return [*environments, *scorers, *tools, *parsers, *named, *agents]


def _scorers(run: RunConfig) -> dict[str, Mapping[str, Any]]:
    """Return the scorers that options of environments qa/SOURCE name, but those of ludic, with settings.

    They are users' functions, those of installed packages, and reward models.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for env in run.env:
        options = run.env_options.get(env)
        if not env.startswith(QUESTIONS) or not isinstance(options, Mapping):
            continue
        settings = options.get("scorer_options")
        for name in (each for option in SCORER_OPTIONS for each in scorer_names(options.get(option))):
            if not isinstance(name, str):
                continue
            if own := own_code_of(SCORER, name):
                found[own] = {}
            elif packaged_part(SCORER, name) is not None:
                found[name] = {}
            elif takes_settings(SCORER, name):
                given = settings.get(name) if isinstance(settings, Mapping) else None
                found[name] = given if isinstance(given, Mapping) else {}
    return found
