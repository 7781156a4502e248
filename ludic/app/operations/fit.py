"""Train a model by one call: from a data set and a reward, from conversations, or from pairs.

The call writes what a run needs, a file of questions and a file with the rewards (ludic.app.operations.fit_inputs), and
starts the same processes as `ludic run` or `ludic train`. So every command works on its root.
"""

import json
import logging
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict
from functools import partial, wraps
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from ludic.app.launch.config import LaunchConfig, Start
from ludic.app.operations.create import RootUrl
from ludic.app.operations.operation import operation
from ludic.app.operations.start import GROUPS, Algorithm
from ludic.base import EXAMPLE_IDS, find_by_name
from ludic.engines import EngineConfig
from ludic.errors import ConfigError, LudicError, MissingRootError
from ludic.run import RunConfig, sampling_uses
from ludic.settings import CodeSettings, SettingsError, convert, flat, given, refuse_unknown, settings_of, split
from ludic.training import TrainConfig

if TYPE_CHECKING:
    from ludic.app.operations.fit_inputs import Inputs, QuestionSet
    from ludic.app.operations.run import Run
    from ludic.app.operations.typed import FitSettings
    from ludic.root import ImportReport, Root
    from ludic.settings import Files

logger = logging.getLogger("ludic.run")

RewardSetting = Callable[..., Any] | str | Sequence[Callable[..., Any] | str] | Mapping[str, Any]
"""A function, the name of a scorer, a list of these, or by name functions, pairs of function and weight, and for names
of scorers weights."""

F = TypeVar("F", bound=Callable[..., Any])
STORED = ("sft", "dpo", "ipo", "orpo")
"""Algorithms that train on the answers of a data set."""
_SFT_LEARNING_RATE = 2e-5
"""Default learning rate of sft: that of full fine-tuning in TRL."""


def _answering_names(algorithm: str | None = None) -> Callable[[F], F]:
    """Make a function refuse names that no setting has, all at once, before it misses arguments that they replace.

    algorithm: that of the function; None takes it from the call.
    """

    def decorate(function: F) -> F:
        @wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            try:
                _check_names(given, algorithm or given.get("algorithm"))
                return function(*args, **given)
            except LudicError as error:
                reported = error
            raise reported.with_traceback(None) from None  # without frames of ludic, as `operation` does

        return call  # type: ignore[return-value]

    return decorate


def _check_names(names: Iterable[str], algorithm: str | None) -> None:
    """Raise ConfigError for names that no setting has, with what they mean in the algorithm, or similar ones."""
    known = [*(each.name for owner in GROUPS.values() for each in settings_of(owner)), *_OWN]
    refuse_unknown(names, known, algorithm=algorithm)


@_answering_names()
@operation(trains=True, **GROUPS)
def fit(
    *,
    algorithm: Algorithm,
    model: str | PathLike[str],
    root: RootUrl,
    dataset: Any = None,
    reward: RewardSetting | None = None,
    heldout: "float | str | PathLike[str] | None" = None,
    system_prompt: str | None = None,
    dataset_options: Mapping[str, Any] | None = None,
    wait: bool = True,
    **settings: Unpack["FitSettings"],
) -> "Run":
    """Train a model on a data set, and return the run.

    Another call with the same root continues the run. A reward that has changed since is stored in the root and used
    from then on; changed settings of the trainer are logged, and settings that a run can't change are refused. The call
    is the consent to run the rewards. Ctrl-C stops all processes after a checkpoint and raises KeyboardInterrupt.
    settings: fields of RunConfig, TrainConfig, EngineConfig and LaunchConfig (docs/settings.md); trust_code and
    update_code. Raises ConfigError, ModelError, ProcessDiedError if a process dies repeatedly, OwnedError if the run is
    trained elsewhere.

    Args:
        algorithm: Preset of docs/algorithms.md. sft trains on conversations, dpo, ipo and orpo on pairs, without
            workers; all others on answers that workers sample.
        model: Folder, Hugging Face id or URL of the first weights.
        root: Folder or URL of the run.
        dataset: File (*.jsonl, *.json, *.csv, *.parquet and others of docs/fit.md), folder or name of a Hugging Face
            dataset, list of dicts, table of pandas, Polars or Arrow, or datasets.Dataset. Questions are in question,
            prompt or messages. sft takes conversations and dpo pairs in the forms of docs/fit.md, such as messages,
            ShareGPT, Alpaca, or prompt, chosen and rejected. None trains in the environment that the setting env names.
        reward: Function of `completion`, or of `completions` for all answers to a question, and of columns by name;
            several as a list, or as a dict of names to functions or to (function, weight). A weight of 0 only measures.
            Or the name of a scorer, such as exact or model:PATH (docs/environments.md); in a list beside functions, in
            a dict with its weight as the value.
        heldout: Share of the questions that are held out of training, or a file with them; None is a quarter.
        system_prompt: First message of every prompt.
        dataset_options: More options of the data set, as those of qa/FILE (docs/environments.md), such as
            {"split": "train"}; {"name": "words"} calls values qa/words.
        wait: Return when training has ended; False starts it in the background and returns at once.
    """
    from ludic.training import load_algorithm

    if algorithm is None:
        raise ConfigError("algorithm is None, wanted a name of docs/algorithms.md, such as grpo")
    _check_agent(settings.get("agent"))
    url, parts = fspath(root), split(settings, **GROUPS)
    options = dict(dataset_options or {})
    if system_prompt is not None:
        options["system_prompt"] = system_prompt
    load_algorithm(algorithm)  # refuses an unknown name
    if algorithm in STORED:
        if reward is not None:
            raise SettingsError(f"reward does not apply to {algorithm}, which trains on the answers of the data set")
        if heldout is not None or system_prompt is not None:
            raise SettingsError(f"heldout and system_prompt do not apply to {algorithm}; put them into the data set")
        return _fit_stored(url, algorithm, str(model), dataset, options, parts, wait=wait)
    if heldout is not None:
        is_share = isinstance(heldout, int | float)
        options |= {"heldout_share" if is_share else "heldout": heldout if is_share else fspath(heldout)}  # type: ignore[arg-type]
    return _fit_sampled(url, algorithm, str(model), dataset, reward, options, parts, wait=wait)


def _check_agent(agent: Any) -> None:
    """Raise ConfigError for a function, which the processes of workers would not find."""
    if callable(agent):
        name = getattr(agent, "__name__", "run")
        raise ConfigError(
            f"agent is a function ({name}), wanted a text; write it into a file of its own, and give "
            f'agent="path/to/file.py:{name}", which workers run in their own processes'
        )


_OWN = ("algorithm", "model", "root", "dataset", "reward", "heldout", "system_prompt", "dataset_options", "wait")


@_answering_names("grpo")
def grpo(
    *,
    model: str | PathLike[str],
    root: RootUrl,
    dataset: Any = None,
    reward: RewardSetting | None = None,
    heldout: "float | str | PathLike[str] | None" = None,
    system_prompt: str | None = None,
    dataset_options: Mapping[str, Any] | None = None,
    wait: bool = True,
    **settings: Unpack["FitSettings"],
) -> "Run":
    """Train a model by GRPO on questions and a reward, and return the run: `ludic.fit(algorithm="grpo", ...)`.

    def reward(completion: str, answer: str) -> float:  # columns of the data set, by name
        return float(completion.strip() == answer)

    run = ludic.grpo(model="Qwen/Qwen3-0.6B", dataset="questions.jsonl", reward=reward, root="runs/mine")
    """
    return _fit_by("grpo", locals())


@_answering_names("sft")
def sft(
    *,
    model: str | PathLike[str],
    root: RootUrl,
    dataset: Any,
    dataset_options: Mapping[str, Any] | None = None,
    wait: bool = True,
    **settings: Unpack["FitSettings"],
) -> "Run":
    """Train a model on conversations, and return the run: `ludic.fit(algorithm="sft", ...)`.

    dataset: rows with `messages`, of which all answers are trained on, with `prompt` and `completion`, or in another
    form of docs/fit.md. Makes one pass over them unless epochs or num_steps is given.
    """
    return _fit_by("sft", locals())


@_answering_names("dpo")
def dpo(
    *,
    model: str | PathLike[str],
    root: RootUrl,
    dataset: Any,
    dataset_options: Mapping[str, Any] | None = None,
    wait: bool = True,
    **settings: Unpack["FitSettings"],
) -> "Run":
    """Train a model on pairs of answers, and return the run: `ludic.fit(algorithm="dpo", ...)`.

    dataset: rows with `prompt`, `chosen` and `rejected`. The reference is the model unless `reference` is given. Makes
    one pass over them unless epochs or num_steps is given.
    """
    return _fit_by("dpo", locals())


def _fit_by(algorithm: str, given: dict[str, Any]) -> "Run":
    """Call `fit`. given: the arguments of a function, which are its locals."""
    settings = given.pop("settings")
    return fit(algorithm=algorithm, **given, **settings)


# --- Rollouts that workers sample ------------------------------------------------------------------------------------


def _fit_sampled(
    url: str,
    algorithm: str,
    model: str,
    dataset: Any,
    reward: RewardSetting | None,
    options: dict[str, Any],
    parts: Mapping[str, dict[str, Any]],
    *,
    wait: bool,
) -> "Run":
    with ExitStack() as stack:
        if wait:
            stack.enter_context(_server_started_early(parts))
        # Now, since they take as long as what the server imports meanwhile.
        from ludic.app.launch.fork_server import start_server
        from ludic.app.launch.local import launch as launch_all
        from ludic.app.launch.preflight import check_start
        from ludic.app.operations.fit_inputs import Inputs
        from ludic.app.operations.run import Run
        from ludic.app.show.watch import log_shown
        from ludic.training import next_config

        inputs, existing = Inputs.of(url), _opened(url)
        with inputs.kept_if_run(existing):
            own: dict[str, Any] = {"model": model} | _environment(
                inputs, dataset, reward, options, parts["run"], existing
            )
            if existing is not None:
                _keep_columns(existing, own)
            run = convert(RunConfig, _earlier(existing) | parts["run"] | own)
            train = next_config(url, parts["train"], algorithm, online=True)
            launching = dict(parts["launch"])
            may_evaluate = "eval_every" not in launching and launching.get("launcher", "local") == "local"
            if may_evaluate and _has_heldout(run, inputs, existing):
                launching["eval_every"] = train.num_steps  # the first version and the last one
            processes, engine = convert(LaunchConfig, launching), convert(EngineConfig, parts["engine"])
            start = Start(url=url, run=run, train=train, processes=processes, engine=engine, root=existing)
            server = stack.enter_context(start_server(start)) if wait else None
            check_start(start)
            root = _open(start, convert(CodeSettings, parts["code"]), inputs)
            inputs.put_data_again()
        _report_changes(root, train)
        if not wait:
            settings = flat(train) | flat(processes) | asdict(engine) | {"model": model}
            _start_in_background("run", root, inputs, settings)
            return Run(root)
        with log_shown():
            # Nodes of a cluster have no consents of this user, who has agreed to all code of the root by now.
            agreed = CodeSettings(trust_code=True)
            launch_all(root, train, processes, engine, model=model, code=agreed, server=server)
            _report_results(Run(root))
    return Run(root)


def _server_started_early(parts: Mapping[str, dict[str, Any]]) -> AbstractContextManager[None]:
    """Start the server from which the run's processes are forked, before it is known which run that is.

    If the run turns out to have another environment, it starts another server. parts: settings as they were given.
    """
    from ludic.app.launch.fork_server import started_early

    launching, num_workers = dict(parts["launch"]), parts["run"].get("num_workers", 1)
    if launching.get("launcher", "local") != "local" or not isinstance(num_workers, int):
        return nullcontext()
    launching.setdefault("eval_every", 1)  # most data sets have questions to evaluate on
    processes = convert(LaunchConfig, launching)
    # A run that is there may have more workers than this call names.
    num_workers = max(num_workers, processes.local_workers or 0)
    return started_early(processes, convert(EngineConfig, parts["engine"]), num_workers)


def _environment(
    inputs: "Inputs",
    dataset: Any,
    reward: RewardSetting | None,
    options: dict[str, Any],
    run: Mapping[str, Any],
    existing: "Root | None",
) -> dict[str, Any]:
    """Return the settings env and env_options of the data set and the rewards; {} if `run` names an environment.

    Data and rewards have the names that they have in an existing run, wherever its root was when it began.
    """
    from ludic.app.operations.fit_inputs import named_rewards, write_questions, write_rewards

    if dataset is None:
        if "env" not in run:
            raise SettingsError('dataset is None; give one and a reward, or an environment: env="moar_cats"')
        if reward is not None or options:
            raise SettingsError("reward, heldout, system_prompt and dataset_options are for a dataset, which is None")
        return {"env": (run["env"],)} if isinstance(run["env"], str) else {}
    if "env" in run:
        raise SettingsError(f"dataset and env ({run['env']}) are both given; choose one")
    if reward is None:
        raise SettingsError("reward is None; give a function of completion and of columns of the data set")
    questions = write_questions(inputs, dataset, options)
    own_name = options.pop("name", None)
    options = {"question": questions.question, "answer": questions.answer} | options
    if isinstance(reward, str):
        options = {"scorer": reward} | options
    else:
        options |= write_rewards(inputs, named_rewards(reward), questions)
    options = {name: each for name, each in options.items() if (name, each) not in _DEFAULTS}
    env, stored = questions.env, questions.stored
    if existing is not None:
        env, stored = _begun_data(inputs, existing, questions, own_name)
        options = _begun_rewards(existing.record.env_options.get(env, {}), options)
    others = dict(run.get("env_options", {}))
    return {"env": (env,), "env_options": others | {env: {**options, **stored}}}


def _begun_data(
    inputs: "Inputs", root: "Root", questions: "QuestionSet", own_name: str | None
) -> tuple[str, Mapping[str, str]]:
    """Return the name and the options that a run has for the rows that a call gives. Raises ConfigError for others."""
    from ludic.root import data_of, stored_options

    wanted = data_of(questions.env, questions.stored)
    begun = {name: data_of(name, root.record.env_options.get(name)) for name in root.record.env}
    held = [name for name, data in begun.items() if data is not None]
    found = next((name for name in held if begun[name] == wanted), None)
    if found is None and held and questions.older is not None:
        with suppress(ConfigError):  # no ludic has written such values
            path, data = questions.older()
            found = next((name for name in held if begun[name] == path), None)
        if found is not None:
            inputs.put_older(data)
            inputs.delete_unused(root)
    if found is None:
        if wanted is not None and held:
            raise ConfigError(
                f"{root.url} began with other rows ({', '.join(held)}), and a run keeps its data set: give those rows, "
                "or choose another root"
            )
        return questions.env, questions.stored
    if own_name is not None and found != questions.env:
        raise ConfigError(f"{root.url} calls this data set {found}, which stays; leave out name={own_name!r}")
    return found, stored_options(root.record.env_options.get(found))


def _begun_rewards(begun: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that name the file of the rewards as the run does, which may have been elsewhere then."""
    from ludic.settings import SCORER_OPTIONS, scorer_names

    def renamed(name: str) -> str:
        same = (each for option in SCORER_OPTIONS for each in scorer_names(begun.get(option)))
        ends = _end_of_rewards(name)
        return next((each for each in same if ends is not None and _end_of_rewards(each) == ends), name)

    found = dict(options)
    for option in SCORER_OPTIONS:
        value = options.get(option)
        if isinstance(value, Mapping):
            found[option] = {renamed(name): each for name, each in value.items()}
        elif isinstance(value, str):
            found[option] = renamed(value)
    return found


def _end_of_rewards(name: Any) -> str | None:
    """Return the function that a name of a scorer has in reward.py, which is in the inputs of a run; else None."""
    from ludic.app.operations.fit_inputs import GROUP_SCORER, SCORER

    path, _, function = str(name).rpartition(":")
    return function if Path(path).name == "reward.py" and function in (SCORER, GROUP_SCORER) else None


def _keep_columns(root: "Root", own: Mapping[str, Any]) -> None:
    """Take over the columns that a run of an older ludic has named. own: settings, whose env_options change.

    Raises ConfigError if the reward names other scorers, or if it sees all answers to a question and did not before, or
    the reverse: run.json holds both.
    """
    for env, options in own.get("env_options", {}).items():
        stored = root.record.env_options.get(env)
        if stored is None:
            continue
        if "columns" in stored:
            options.setdefault("columns", stored["columns"])
        if _as_json(options.get("scorer")) != _as_json(stored.get("scorer")):
            raise ConfigError(
                f"{root.url} began with the scorers {stored.get('scorer')}, and reward now names "
                f"{options.get('scorer')}; functions may change, and scorers and their weights can't: choose another "
                "root"
            )
        if options.get("group_scorer") != stored.get("group_scorer"):
            now, before = ("a", "none did") if "group_scorer" in options else ("no", "one did")
            raise ConfigError(
                f"{root.url}: {now} function of reward sees all answers to a question (completions), and when the run "
                f"began {before}; a run can't change this: choose another root"
            )


_DEFAULTS: Sequence[tuple[str, Any]] = (("question", "question"), ("answer", "answer"), ("columns", []))
"""Options that an environment of questions has anyway."""


def _has_heldout(run: RunConfig, inputs: "Inputs", existing: "Root | None" = None) -> bool:
    """Return whether each environment has an example to evaluate; log it if not."""
    from ludic.environments import make_environment
    from ludic.root.storage import Storage
    from ludic.run import located

    run = located(run, existing or Storage.connect(inputs.url))
    for env in run.env:
        make = make_environment(env, run.env_options.get(env), run.seed, _rewards_on_disk(run, inputs))
        try:
            make().example(0, "heldout")
        except ConfigError as error:
            logger.warning("nothing is evaluated: %s; heldout=0.5 holds out half of the questions", error)
            return False
    return True


def _opened(url: str) -> "Root | None":
    """Return an existing run; None if there is none."""
    from ludic.root import Root

    try:
        return Root.open(url, writable=True)
    except MissingRootError:
        return None


def _earlier(root: "Root | None") -> dict[str, Any]:
    """Return the settings of an existing run; {} if there is none."""
    from ludic.run import run_of

    return {} if root is None else given(asdict(run_of(root)), f"earlier settings of {root.url}", "stored")


def _open(start: Start, code: CodeSettings, inputs: "Inputs") -> "Root":
    """Start the run, or open it and store the rewards as they are now. Raises ConfigError for other settings."""
    from ludic.app.launch.preflight import check_code
    from ludic.app.launch.roots import create_run, open_or_start, prepare_run_code

    check = partial(check_code, start)
    if start.root is None:
        return create_run(start.url, start.run, start.train, code, check)
    root = open_or_start(start.url, start.run)
    _renew_rewards(root, inputs)
    prepare_run_code(root, start.train, code, check)
    return root


def _rewards_on_disk(run: RunConfig, inputs: "Inputs") -> "Files":
    """Return the rewards as the call has written them, under the name that the run has for their file; {} for none."""
    from ludic.settings import file_of, read_user_file

    named = [use.setting for use in sampling_uses(run) if _end_of_rewards(use.setting) is not None]
    path = file_of(named[0]) if named else None
    return {} if path is None else {path: read_user_file(inputs.path_of("reward.py"))}


def _renew_rewards(root: "Root", inputs: "Inputs") -> None:
    """Give consent to the questions and the rewards that the call named, and store the rewards' text if it is new."""
    from ludic.root import keep_files
    from ludic.run import find_files, run_of
    from ludic.settings import KINDS, file_of, find, give_consent

    run = run_of(root)
    files = _rewards_on_disk(run, inputs)
    if not files:
        return
    ((path, file),) = files.items()
    named = sampling_uses(run)
    rewards = [use for use in named if _end_of_rewards(use.setting) is not None]
    for use in rewards:
        find(KINDS[use.role], use.setting, {path: file})
    kept = find_files(root, rewards[:1])
    if path in kept.snapshots and not kept.files[path].is_same_text(file):
        logger.warning("the rewards have changed since the run last started; the new text runs from now on")
    for use in [*rewards, *(use for use in named if use.role == "environment" and file_of(use.setting) is None)]:
        give_consent(use, files, root=root.url, run_id=root.run_id)
    keep_files(root, files)


def _report_changes(root: "Root", train: TrainConfig) -> None:
    """Log the settings of the trainer that differ from those of the run's last trainer."""
    from ludic.root import newest_attempt_id, read_attempt

    attempt_id = newest_attempt_id(root)
    if not attempt_id:
        return
    before = read_attempt(root, attempt_id).config
    now = _as_json(train.flat())
    changed = [
        f"{name} was {before.get(name)!r} and is {each!r}" for name, each in now.items() if before.get(name) != each
    ]
    if changed:
        logger.warning("settings that differ from those of the last start: %s", "; ".join(changed))


_MOST_ERRORS = 3
"""Kinds of errors that are told at the end."""


def _report_results(run: "Run") -> None:
    """Log the most frequent errors of rollouts, and how the last version that was evaluated compares with the first."""
    from ludic.app.show.evaluations import interval_phrase
    from ludic.base import number
    from ludic.eval import stored_versions
    from ludic.root.sql import Connections, ask, figure

    with Connections() as connections:
        con = connections.to(run.root)
        errors = ask(con, run.root, figure("errors"), {"most": _MOST_ERRORS})
        versions = stored_versions(con, run.root, None)
    for row in errors:
        logger.warning("%d rollouts of %s failed: %s", row["num_rollouts"], row["env_name"], row["error"])
    if len(versions) < 2:
        return
    try:
        rows = run.compare(versions[0], versions[-1]).compared.rows
    except ConfigError as error:  # they have no example in common
        logger.warning("versions %d and %d are not compared: %s", versions[0], versions[-1], error)
        return
    for each in rows:
        before, after, gain = (number(each[name], 3) for name in ("estimate_a", "estimate_b", "difference"))
        logger.info(
            "%s, held out: mean reward %s at version %d, %s at version %d; difference %s, %s",
            *(each["env_name"], before, versions[0], after, versions[-1], gain),
            interval_phrase(each, 3),
        )


def _as_json(values: Any) -> Any:
    """Return values as JSON has them: tuples are lists."""
    return json.loads(json.dumps(values))


# --- Rows of the data set --------------------------------------------------------------------------------------------


def _fit_stored(
    url: str,
    algorithm: str,
    model: str,
    dataset: Any,
    options: Mapping[str, Any],
    parts: Mapping[str, dict[str, Any]],
    *,
    wait: bool,
) -> "Run":
    """Import the data set as rollouts, and train on them without workers."""
    from ludic.app.launch.preflight import check_start
    from ludic.app.launch.roots import open_or_start
    from ludic.app.operations.fit_inputs import Inputs
    from ludic.app.operations.run import Run
    from ludic.app.operations.start import train as train_here
    from ludic.app.show.watch import log_shown
    from ludic.base import progress_bar
    from ludic.training import next_config

    if others := {**parts["launch"], **parts["engine"]}:
        raise SettingsError(f"{next(iter(others))} does not apply to {algorithm}, which trains without workers")
    if "env" in parts["run"]:
        raise SettingsError(f"env does not apply to {algorithm}, which trains on the rows of a data set")
    if "max_steps" in parts["run"]:
        raise SettingsError(
            f"max_steps does not apply to {algorithm}: ludic's are the most steps of an episode; set num_steps"
        )
    inputs, existing = Inputs.of(url), _opened(url)
    with inputs.kept_if_run(existing):
        run = convert(RunConfig, _earlier(existing) | parts["run"] | {"model": model, "env": (algorithm,)})
        own: dict[str, Any] = {"offline": True} | parts["train"]
        if existing is None:
            defaults = {"learning_rate": _SFT_LEARNING_RATE} if algorithm == "sft" else {}
            own = {**defaults, **({} if "num_steps" in own else {"epochs": 1}), **own}
        if algorithm in ("dpo", "ipo"):
            own = {"reference": model} | own
        train = next_config(url, own, algorithm)
        file, rows = _write_records(inputs, algorithm, dataset, options, is_sft=algorithm == "sft")
        here = Start(url=url, run=run, train=train, processes=LaunchConfig(), engine=EngineConfig(), root=existing)
        check_start(here, has_workers=False)
        if existing is not None:
            _refuse_other_rows(existing, file)
        root = open_or_start(url, run)
        inputs.put_data_again()
    with progress_bar() as track:
        import_files = find_by_name("ludic.adapters.imports.importing:import_files")
        reports = import_files(root, [str(file)], "jsonl", env=algorithm, track=track)
    _report_unused(reports, rows)
    _report_changes(root, train)
    if not wait:
        _start_in_background("train", root, inputs, flat(train))
    else:
        with log_shown():
            train_here(Run(root), train, **parts["code"])
    return Run(root)


def _report_unused(reports: "Iterable[ImportReport]", rows: Sequence[int]) -> None:
    """Log what an import did not use. rows: number of the row that each record was made of."""
    for report in reports:
        if report.refused:
            first = report.refused[0]
            numbers = {rows[each.line - 1] for each in report.refused}
            logger.warning(
                "%d of the rows can't be used; the first is row %d: %s",
                *(len(numbers), rows[first.line - 1], first.reason),
            )
        if unread := {name: number for name, number in report.not_kept.items() if "[]." in name}:
            named = ", ".join(f"{name} ({number:,})" for name, number in unread.items())
            logger.warning("fields of messages that are not used: %s", named)


def _write_records(
    inputs: "Inputs", algorithm: str, dataset: Any, options: Mapping[str, Any], *, is_sft: bool
) -> tuple[Path, list[int]]:
    """Return the file of the records, and the number of the row that each was made of."""
    from ludic.app.operations.fit_inputs import read_rows
    from ludic.app.show.watch import log_shown

    if dataset is None:
        raise SettingsError(f"dataset is None; {algorithm} trains on its rows")
    if unknown_ones := options.keys() - {"split", "config", "revision"}:
        raise SettingsError(f"dataset_options has {min(unknown_ones)}; {algorithm} takes split, config and revision")
    rows, where = read_rows(dataset, options)
    forms = "ludic.adapters.imports.forms:conversations" if is_sft else "ludic.adapters.imports.forms:pairs"
    read = find_by_name(forms)(rows, where)
    with log_shown():
        logger.info("%s", read.said)
    return inputs.put_rows(read.records, where), [int(each["group_id"]) for each in read.records]


def _refuse_other_rows(root: "Root", file: Path) -> None:
    """Raise ConfigError if a run holds the rows of another data set, which it would train on too."""
    from ludic.root import IMPORTS

    for name in IMPORTS.listed(root):
        begun = IMPORTS.read(root, *name)
        if begun is not None and Path(begun.file).name != file.name:
            changed = (
                "; if it is the same data set, this ludic makes other records of it than the one that began the run: a "
                "null field of a table's struct is absent now, and the prompt of a pair is all that chosen and "
                f"rejected begin with; `ludic train {root.url}` goes on with the rows that the root holds"
            )
            raise ConfigError(
                f"{root.url} holds the rows of another data set ({begun.file}); choose another root"
                + (changed if root.example_ids != EXAMPLE_IDS[0] else "")
            )


# --- In the background -----------------------------------------------------------------------------------------------


_started: list["subprocess.Popen[bytes]"] = []
"""Processes that go on when this one ends."""


def _start_in_background(command: str, root: "Root", inputs: "Inputs", settings: Mapping[str, Any]) -> None:
    """Start `ludic run` or `ludic train`, which outlives this process."""
    from ludic.app.launch.local import log_folder
    from ludic.app.launch.process import ENVIRONMENT
    from ludic.app.launch.supervisor import make_log_folder
    from ludic.base import start_python
    from ludic.root.storage import open_to_append

    data = json.dumps(dict(settings), indent=1).encode()
    file = inputs.put("settings.json", data)
    log = log_folder(root) / f"{command}.log"
    make_log_folder(log.parent)
    with open_to_append(log) as out:
        process = start_python(
            ["-m", "ludic", command, root.url, "--config", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            environment={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )
    _started.append(process)
    logger.warning(
        "%s trains in process %d; `ludic watch %s` shows it, `kill %d` stops it, and %s is its log",
        *(root.url, process.pid, root.url, process.pid, log),
    )
