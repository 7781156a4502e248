"""The public API: a name, a method or an argument that changes here breaks users' notebooks and pipelines.

Add to these lists what is new. A change to a line needs an entry in CHANGELOG.md.
"""

import inspect

import ludic

NAMES = [
    "AgentStep",
    "EnvironmentStep",
    "Message",
    "Rollout",
    "RolloutBatch",
    "RolloutGroup",
    "RolloutMetadata",
    "Root",
    "Run",
    "RunConfig",
    "ToolCall",
    "connect",
    "create",
    "open",
    "refresh",
    "scan",
]
METHODS = {
    "bisect": ["predicate", "table"],
    "cluster_files": ["system", "config", "*cluster", "*engine", "*algorithm", "settings"],
    "compare": [
        "sides",
        "*env",
        "*evaluation",
        "*measures",
        "*params",
        "*confidence",
        "*difference",
        "*seed",
    ],
    "compact": ["before", "*all_versions", "*target_bytes", "*dry_run", "*track"],
    "contamination": ["*also", "*env", "*evaluation", "*query", "*params"],
    "cut": ["step", "out"],
    "evaluate": [
        "versions",
        "*suite",
        "*measures",
        "*params",
        "*confidence",
        "*interval",
        "*engine",
        "*device",
        "*model",
        "*stop",
        "*report",
        "*trust_code",
        "*update_code",
        "settings",
    ],
    "evaluation": ["versions", "*env", "*measures", "*params", "*confidence", "*interval"],
    "expire": [
        "*keep_versions",
        "*before",
        "*older_than",
        "*where",
        "*folder",
        "*break_resume",
        "*break_replay",
        "*dry_run",
        "*track",
    ],
    "export": ["format", "target", "*table", "*where", "*sql", "*step", "*version", "*model", "*track"],
    "group": ["group_id"],
    "import_": ["files", "format", "*env", "*tokenizer", "*model", "*track"],
    "label": ["rollout_id", "value", "*note", "*name", "*author"],
    "launch": [
        "config",
        "*algorithm",
        "*local_workers",
        "*ranks",
        "*engine",
        "*trainer_gpus",
        "*worker_gpus",
        "*env_timeout_s",
        "*launcher",
        "*ray_address",
        "*ray_cpus",
        "*eval_every",
        "*eval_options",
        "*model",
        "*take_over",
        "*stop_within_s",
        "*trust_code",
        "*update_code",
        "settings",
    ],
    "report": ["output", "*versions", "*compare", "*measures", "*params", "*confidence", "*overwrite"],
    "rollout": ["rollout_id"],
    "sample": [
        "prompt",
        "n",
        "*version",
        "*system",
        "*temperature",
        "*top_p",
        "*top_k",
        "*max_tokens",
        "*seed",
        "*device",
    ],
    "scale": ["num_workers", "*ray_address"],
    "serve": ["*stop", "settings"],
    "score": [
        "scorer",
        "*name",
        "*table",
        "*where",
        "*concurrency",
        "*scorer_timeout_s",
        "*retry_failed",
        "*track",
        "judge",
    ],
    "show": ["any_id"],
    "sql": ["query", "params", "*also", "*unsafe"],
    "sql_stream": ["query", "params", "*also", "*unsafe"],
    "stats": ["*track"],
    "status": [],
    "train": [
        "config",
        "*algorithm",
        "*model",
        "*resume",
        "*take_over",
        "*stop",
        "*report",
        "*trust_code",
        "*update_code",
        "settings",
    ],
    "verify": ["*repair", "*track"],
    "view": ["rollout_id", "*author", "*picture", "*web", "*host", "*host_names", "*port"],
    "watch": ["interval_s"],
    "work": [
        "num_groups",
        "*engine",
        "*device",
        "*slot",
        "*in_flight",
        "*env_timeout_s",
        "*model",
        "*stop",
        "*report",
        "*trust_code",
        "*update_code",
    ],
    "what_if": [
        "*advantage",
        "*filters",
        "*algorithm",
        "*sql_params",
        "*steps",
        "*train",
        "*from_step",
        "*num_steps",
        "*track",
    ],
}
"""Methods of Run and their arguments; * marks an argument that is given by name only."""
PROPERTIES = ["config", "url"]


def arguments(method: object) -> list[str]:
    assert callable(method)
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return [f"{'*' * (parameter.kind is parameter.KEYWORD_ONLY)}{parameter.name}" for parameter in parameters]


def test_the_names_of_the_package_are_these() -> None:
    assert sorted(ludic.__all__) == NAMES
    assert all(getattr(ludic, name) is not None for name in NAMES)


def test_the_methods_of_a_run_are_these() -> None:
    public = {name: value for name, value in vars(ludic.Run).items() if not name.startswith("_")}
    assert {name: arguments(value) for name, value in public.items() if callable(value)} == METHODS
    assert sorted(name for name, value in public.items() if isinstance(value, property)) == PROPERTIES


def test_every_method_has_a_docstring_and_annotations() -> None:
    for name in METHODS:
        method = getattr(ludic.Run, name)
        assert method.__doc__, name
        parameters = list(inspect.signature(method).parameters.values())[1:]
        assert all(parameter.annotation is not parameter.empty for parameter in parameters), name
        assert inspect.signature(method).return_annotation is not inspect.Signature.empty, name
