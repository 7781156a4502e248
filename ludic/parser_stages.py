"""Read the setting that names a parser: its stages, and the users' code that they name.

The store asks this for consent, and ludic.agents.parsers to build the parser, so both see the same code.
"""

from ludic.user_files import python_file_of


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


def own_code_of(stage: str) -> str | None:
    """Return the path/to/file.py:Name in a stage, also that of json:path/to/file.py:Name; None if there is none."""
    name = stage.removeprefix("json:")
    return name if python_file_of(name) is not None and not stage.startswith("regex:") else None
