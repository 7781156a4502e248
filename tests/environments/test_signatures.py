"""A method or a scorer with other parameters than it is called with is refused with file, line and the right ones."""

import inspect
import re
from pathlib import Path

import pytest

from ludic.environments import environment
from ludic.environments.environment import arguments_of, methods_of
from ludic.environments.registry import make_environment
from ludic.errors import ConfigError
from ludic.eval.scoring.score import UsersScorer

MAIN = (environment.SingleTurnEnvironment, environment.Environment, environment.MultiAgentEnvironment)
PROTOCOLS = [
    each
    for each in vars(environment).values()
    if inspect.isclass(each) and each.__module__ == environment.__name__ and getattr(each, "_is_protocol", False)
]
CASES = [
    (protocol if protocol in MAIN else environment.Environment, protocol, method)
    for protocol in PROTOCOLS
    for method in methods_of(protocol)
]
WRONG = {"too few": lambda names: names[:-1], "too many": lambda names: [*names, "label"]}


def write(path: Path, methods: dict[str, list[str]], *, kind: str = "") -> str:
    """Write a class with these methods and parameters; returns the name of its environment."""
    lines = ["class Env:"]
    for method, names in methods.items():
        lines += ["", f"    {kind}def {method}({', '.join(['self', *names])}):", "        raise NotImplementedError"]
    path.write_text("\n".join(lines) + "\n")
    return f"{path}:Env"


def test_all_protocols_of_environments_are_looked_at() -> None:
    assert {*MAIN, *environment._OPTIONAL} == {*PROTOCOLS}


@pytest.mark.parametrize(("main", "protocol", "method"), CASES, ids=lambda each: getattr(each, "__name__", each))
@pytest.mark.parametrize("change", WRONG)
@pytest.mark.parametrize("kind", ["", "async "])
def test_each_method_with_other_parameters_is_named(
    tmp_path: Path, main: type, protocol: type, method: str, change: str, kind: str
) -> None:
    methods = {name: arguments_of(one, name) for one in (main, protocol) for name in methods_of(one)}
    make_environment(write(tmp_path / "right.py", methods, kind=kind))
    wanted = methods[method]
    methods[method] = WRONG[change](wanted)
    if methods[method] == wanted:  # of a method without arguments, none can be left out
        return
    name = write(tmp_path / "mine.py", methods, kind=kind)
    line = 3 + 3 * [*methods].index(method)
    with pytest.raises(ConfigError) as raised:
        make_environment(name)
    assert str(raised.value) == (
        f"environment {name}: its {method} takes ({', '.join(methods[method])}), wanted ({', '.join(wanted)}) "
        f"(mine.py:{line}, in {method}); write def {method}({', '.join(['self', *wanted])})"
    )


def test_other_names_defaults_and_stars_fit(tmp_path: Path) -> None:
    name = write(tmp_path / "mine.py", {"example": ["i", "part='train'", "*more"], "score": ["*all"]})
    make_environment(name)


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("scorer", ["example", "answer"]),
        ("group_scorer", ["example", "answers"]),
        ("verl", ["data_source", "solution_str", "ground_truth", "extra_info"]),
    ],
)
def test_a_scorer_with_other_parameters_is_named(tmp_path: Path, setting: str, names: list[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n' * 8)
    for parameters in ("prompt", "prompt, completion, answer"):
        (tmp_path / "rewards.py").write_text(f"x = 1\ndef rate({parameters}):\n    return 1.0\n")
        named = f"{tmp_path}/rewards.py:rate"
        options = {"scorer": f"verl:{named}", "answer": "answer"} if setting == "verl" else {setting: named}
        said = rf"{named} takes \({parameters}\), wanted \({', '.join(names)}\) \(rewards\.py:2, in rate\)$"
        with pytest.raises(ConfigError, match=said):
            make_environment(f"qa/{tmp_path}/rows.jsonl", options)


def test_a_scorer_of_rollouts_with_other_parameters_is_named(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def rate(example, answer):\n    return 1.0\n")
    with pytest.raises(
        ConfigError, match=re.escape("takes (example, answer), wanted (rollout) (rewards.py:1, in rate)")
    ):
        UsersScorer(f"{tmp_path}/rewards.py:rate")
