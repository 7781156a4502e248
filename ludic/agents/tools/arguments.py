"""Read the arguments of a tool call and check them against the tool's JSON schema.

Every problem raises ToolError, with a message that tells the model what to change.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from ludic.errors import ConfigError, ToolError

MAX_PROBLEMS = 5
"""Largest number of problems that one message lists."""
MAX_PROBLEM_CHARS = 300
"""Longest problem in a message; jsonschema prints the whole value that it refuses."""


def read_arguments(text: str) -> dict[str, Any]:
    """Parse the JSON text of a call's arguments. Raises ToolError unless it is one JSON object."""
    try:
        arguments = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are not valid JSON ({error}); wanted one JSON object") from error
    if not isinstance(arguments, dict):
        raise ToolError(f"the arguments are JSON, but {_json_type(arguments)}; wanted one JSON object")
    return arguments


def refuse_constant(name: str) -> Any:
    """Raise ValueError for NaN and Infinity, which Python's json reads and JSON does not have."""
    raise ValueError(f"{name} is not a JSON number")


def make_validator(schema: Mapping[str, Any]) -> Any:
    """Return a jsonschema validator of a tool's parameters. Raises ConfigError if its schema is not a JSON schema."""
    from jsonschema.exceptions import SchemaError as InvalidSchema
    from referencing import Registry

    function = schema["function"]
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    try:
        _validator_class().check_schema(parameters)
    except InvalidSchema as error:
        raise ConfigError(f"tool {function['name']}: its parameters are no JSON schema: {error.message}") from error
    # An empty registry: a schema from a server must not make this process fetch addresses.
    return _validator_class()(parameters, registry=Registry())


def check_arguments(validator: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ToolError that lists what does not fit the schema."""
    problems = [*_unknown_names(validator.schema, arguments), *map(_describe, validator.iter_errors(arguments))]
    if problems:
        more = len(problems) - MAX_PROBLEMS
        listed = "; ".join(problems[:MAX_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
        raise ToolError(f"the arguments do not fit: {listed}")


@cache
def _validator_class() -> Any:
    """Draft 2020-12 with `nullable`, which transformers writes for `X | None`, and without 3.0 as an integer."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    def is_integer(checker: Any, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    def nullable(keyword: str) -> Any:
        check = Draft202012Validator.VALIDATORS[keyword]

        def check_unless_null(validator: Any, wanted: Any, value: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
            if not (value is None and schema.get("nullable")):
                yield from check(validator, wanted, value, schema) or ()

        return check_unless_null

    return extend(
        Draft202012Validator,
        {keyword: nullable(keyword) for keyword in ("type", "enum", "anyOf")},
        type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", is_integer),
    )


def _unknown_names(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[str]:
    """Describe arguments that the schema does not list. JSON schema allows them; for a call they are mistakes."""
    if "properties" not in schema or "additionalProperties" in schema or "patternProperties" in schema:
        return []
    known = ", ".join(schema["properties"]) or "none"
    unknown = [name for name in arguments if name not in schema["properties"]]
    return [_cut(f"there is no argument {name!r} (there are: {known})") for name in unknown]


def _describe(error: Any) -> str:
    place = "".join(f"[{key!r}]" for key in list(error.absolute_path)[1:])
    where = f"argument {error.absolute_path[0]}{place}: " if error.absolute_path else ""
    return _cut(f"{where}{error.message}")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_PROBLEM_CHARS else f"{text[:MAX_PROBLEM_CHARS]}..."


def _json_type(value: Any) -> str:
    if isinstance(value, list):
        return "an array"
    return "a string" if isinstance(value, str) else f"the value {json.dumps(value)}"
