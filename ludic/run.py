"""Run: every operation of ludic on one root. The command line, notebooks and pipelines all use it.

Each method imports what it needs when it is called, so that `import ludic` stays light. A method that may take long has
an argument `track` that shows progress (ludic.store.root); by default it is silent. Any method raises StoreError if
the root's filesystem fails.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from ludic.code.consent import CodeSettings
from ludic.defaults import ENGINE, TARGET_BYTES
from ludic.errors import ConfigError
from ludic.launch import eval_methods, what_if_methods
from ludic.launch import run_methods as methods
from ludic.settings import check_names
from ludic.store import Root, RunConfig
from ludic.store.root import Track, untracked
from ludic.viewer import methods as view_methods

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

    from ludic.adapters.clusters.config import ClusterConfig, System
    from ludic.adapters.exports.exporting import Format
    from ludic.adapters.exports.inspect_logs import LogsReport
    from ludic.adapters.exports.tables import TableReport
    from ludic.adapters.exports.text import TextReport
    from ludic.adapters.exports.weights import WeightsReport
    from ludic.engines.config import EngineConfig
    from ludic.maintenance.compact import CompactionReport
    from ludic.maintenance.expire import ExpiryReport
    from ludic.maintenance.verify import Report
    from ludic.rollouts.sample import Answer
    from ludic.scoring.score import ScoreReport
    from ludic.sql.roots import RootLike
    from ludic.store.records import ImportReport
    from ludic.training.config import TrainConfig
    from ludic.viewer.status import RunStatus, Watcher


class Run:
    """A run, by its root; `ludic.open` and `ludic.create` return one."""

    def __init__(self, root: Root) -> None:
        self.root = root

    @property
    def url(self) -> str:
        """URL or path of the root."""
        return self.root.url

    @property
    def config(self) -> RunConfig:
        """Settings that workers and trainers share, from run.json."""
        return self.root.run

    def __repr__(self) -> str:
        return f"ludic.open({self.url!r})"

    # --- Sample and train ----------------------------------------------------------------------------------

    work = methods.work
    serve = methods.serve
    train = methods.train
    launch = methods.launch
    evaluate = eval_methods.evaluate

    # --- Read --------------------------------------------------------------------------------------------

    stats = view_methods.stats
    evaluation = eval_methods.evaluation
    compare = eval_methods.compare
    contamination = eval_methods.contamination
    what_if = what_if_methods.what_if
    bisect = what_if_methods.bisect
    cut = what_if_methods.cut

    def sql(
        self,
        query: str,
        *params: Any,
        also: "Iterable[RootLike]" = (),
        unsafe: bool = False,
    ) -> "pl.DataFrame":
        """Return the rows of a SQL query over the run's views (docs/reading.md) as a Polars DataFrame.

        params: values of the query's ? in order, or one mapping for its $names. also: more runs to query. unsafe: run
        any statement, which may read and write files; without it, a query may only read, and only these runs.
        Raises QueryError.
        """
        from ludic.sql.query import to_frame

        with self.sql_stream(query, *params, also=also, unsafe=unsafe) as reader:
            return to_frame(reader)

    def sql_stream(
        self, query: str, *params: Any, also: "Iterable[RootLike]" = (), unsafe: bool = False
    ) -> "AbstractContextManager[pa.RecordBatchReader]":
        """Give the result of a query as a stream of Arrow batches of 10,000 rows, for results larger than memory.

        The arguments are those of `sql`. Raises QueryError, also while the stream is read.
        """
        from ludic.sql.query import open_result
        from ludic.sql.roots import open_roots

        values = params[0] if len(params) == 1 and isinstance(params[0], Mapping) else params
        return open_result(open_roots([self.root, also]), query, values, unsafe=unsafe)

    def status(self) -> "RunStatus":
        """Return the current state: trainer, newest steps, rates, policy, checkpoint, troubles.

        Later calls can tell if the trainer is alive, since they see whether its lease is renewed. Raises SchemaError.
        """
        return self._watcher.look()

    def watch(self, interval_s: float = 2.0) -> None:
        """Print the state every `interval_s` seconds until Ctrl-C. Raises MissingRootError if the run is deleted."""
        from ludic.viewer.live import watch
        from ludic.viewer.output import stdout_console

        watch(self._watcher, stdout_console(), interval_s)

    @cached_property
    def _watcher(self) -> "Watcher":
        from ludic.viewer.status import Watcher

        return Watcher(self.url)

    view = view_methods.view
    label = view_methods.label
    rollout = view_methods.rollout
    group = view_methods.group
    show = view_methods.show
    report = view_methods.report

    def sample(
        self,
        prompt: str,
        n: int = 1,
        *,
        version: int | None = None,
        system: str | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
        device: Literal["cpu", "cuda"] | None = None,
    ) -> "list[Answer]":
        """Sample n answers to a user message from a policy version, by default the latest; nothing is stored.

        Sampling settings that are None are the run's. Each answer has text, tokens, logprobs (nats) and finish_reason.
        Raises ConfigError if there are no such weights or the prompt is too long, ModelError for broken weights.
        """
        from ludic.rollouts.config import Question
        from ludic.rollouts.sample import sample_run

        question = Question(
            prompt=prompt,
            n=n,
            system=system,
            run={"temperature": temperature, "top_p": top_p, "top_k": top_k, "max_tokens": max_tokens},
            seed=seed,
            device=device,
        )
        return sample_run(self.root, question, version)

    def score(
        self,
        scorer: str | None = None,
        *,
        name: str | None = None,
        table: Literal["rollouts", "evals"] = "rollouts",
        where: str | None = None,
        concurrency: int = 16,
        scorer_timeout_s: float = 60.0,
        retry_failed: bool = False,
        track: Track = untracked,
        **judge: Any,
    ) -> "ScoreReport":
        """Score stored rollouts with a user's function, or with an LLM judge, and append the values to scores/.

        scorer: path/to/file.py:function, or None for a judge. name: of the scorer. where: a SQL predicate; None scores
        all. concurrency: rollouts at a time. scorer_timeout_s: maximum seconds of one rollout. retry_failed: also score
        those that failed before. judge: the options judge_url, judge_model, ... of `ludic score`. A rollout that this
        version of the scorer has scored is left out. Raises ConfigError, QueryError; TimeLimitError if a scorer hangs.
        """
        from ludic.scoring.options import ScoreOptions
        from ludic.scoring.score import score_rollouts

        check_names(judge, ScoreOptions, "setting of a judge")
        options = ScoreOptions(
            scorer=scorer,
            name=name,
            table=table,
            where=where,
            concurrency=concurrency,
            scorer_timeout_s=scorer_timeout_s,
            retry_failed=retry_failed,
            **judge,
        )
        return score_rollouts(self._writable(), options, track)

    # --- Maintain ----------------------------------------------------------------------------------------

    def compact(
        self,
        before: int | None = None,
        *,
        all_versions: bool = False,
        target_bytes: int = TARGET_BYTES,
        dry_run: bool = False,
        track: Track = untracked,
    ) -> "CompactionReport":
        """Rewrite the small files of versions below `before` into files of about `target_bytes` bytes.

        None takes the versions that workers and the newest trainer no longer use. all_versions: take every version, for
        a finished run. Files of requests/, which have no versions, are always taken. Safe while the run and readers
        continue; after an interruption, call it again. Raises ConfigError for both before and all_versions.
        """
        from ludic.maintenance.compact import compact, sealed_before

        if all_versions and before is not None:
            raise ConfigError("all_versions and before contradict each other; give one of them")
        root = self._writable(not dry_run)
        if before is None and not all_versions:
            before = sealed_before(root)
        return compact(root, before_version=before, target_bytes=target_bytes, dry_run=dry_run, track=track)

    def expire(
        self,
        *,
        keep_versions: int | None = None,
        before: int | None = None,
        older_than: str | None = None,
        where: str | None = None,
        folder: str = "rollouts",
        break_resume: bool = False,
        break_replay: bool = False,
        dry_run: bool = False,
        track: Track = untracked,
    ) -> "ExpiryReport":
        """Delete the files whose rows all match one rule, except those that a resumed trainer or a replay needs.

        The rule is one of keep_versions (number of newest versions to keep), before (versions below this one),
        older_than (an age such as "7d") and where (a SQL predicate over rollouts). folder: see
        `ludic.maintenance.expiry_rule.ExpiryRule`. break_resume, break_replay: delete needed files, too. Raises
        ConfigError for a bad rule, QueryError for a bad predicate.
        """
        from ludic.maintenance.expire import expire
        from ludic.maintenance.expiry_rule import ExpiryRule

        rule = ExpiryRule(folder=folder, keep_versions=keep_versions, before=before, older_than=older_than, where=where)
        return expire(
            self._writable(not dry_run),
            rule,
            break_resume=break_resume,
            break_replay=break_replay,
            dry_run=dry_run,
            track=track,
        )

    def verify(self, *, repair: bool = False, track: Track = untracked) -> "Report":
        """Check every file and the data; return findings (none if the run is sound), notes and repairs.

        repair: also move broken files to quarantine/, and delete temporary files that are older than a day.
        """
        from ludic.maintenance.verify import check_root

        return check_root(self._writable(repair), track, repair=repair)

    # --- Other clusters ------------------------------------------------------------------------------------

    def scale(self, num_workers: int, *, ray_address: str | None = None) -> None:
        """Change the number of workers of a run that `ludic run --launcher ray` has started, from any process.

        ray_address: as for `launch`. Raises ConfigError if no such run is found on the cluster.
        """
        from ludic.adapters.ray.launcher import scale

        scale(self.root, num_workers, ray_address)

    def cluster_files(
        self,
        system: "System",
        config: "TrainConfig | None" = None,
        *,
        cluster: "ClusterConfig | None" = None,
        engine: "str | EngineConfig" = ENGINE,
        algorithm: str | None = None,
        **settings: Any,
    ) -> dict[str, str]:
        """Return the files that start this run on a cluster, by name; nothing is started (docs/launch.md).

        system: "slurm", "kubernetes" or "skypilot". cluster: machines and jobs. engine: of the workers, by name or by
        its settings. config, algorithm, settings: of the trainer, as in `train`. Raises ConfigError.
        """
        from ludic.adapters.clusters.config import ClusterConfig
        from ludic.adapters.clusters.systems import cluster_files
        from ludic.engines.config import EngineConfig

        config = methods.train_config(self.root, config, algorithm, settings, online=True)
        engine = EngineConfig(engine=engine) if isinstance(engine, str) else engine
        return cluster_files(self.root, system, config, engine, cluster or ClusterConfig())

    # --- Export and import ---------------------------------------------------------------------------------

    def export(
        self,
        format: "Format",
        target: str | PathLike[str] | BinaryIO | None = None,
        *,
        table: Literal["rollouts", "evals"] = "rollouts",
        where: str | None = None,
        sql: str | None = None,
        step: int | None = None,
        version: int | None = None,
        model: str | None = None,
        track: Track = untracked,
    ) -> "TableReport | TextReport | WeightsReport | LogsReport":
        """Export the files as a delta or iceberg table, rows as jsonl or csv, weights as hf, evaluations as inspect.

        target: jsonl, csv: a file that does not exist, or an open binary file; hf: a folder or URL that does not exist;
        iceberg, inspect: the local folder of the catalog or of the logs. where, sql: the rows of jsonl and csv. step,
        version, model: the weights of hf, by default the newest version; version also of inspect, by default all.
        Raises ConfigError if options do not fit the format or the target exists, QueryError if the SQL fails.
        """
        from ludic.adapters.exports.exporting import ExportOptions, export

        options = ExportOptions(
            format=format, table=table, where=where, sql=sql, step=step, version=version, model=model
        )
        return export(self.root, options, fspath(target) if isinstance(target, PathLike) else target, track)

    def import_(
        self,
        files: str | PathLike[str] | Sequence[str | PathLike[str]],
        format: str,
        *,
        env: str | None = None,
        tokenizer: str | None = None,
        model: str | None = None,
        track: Track = untracked,
    ) -> "list[ImportReport]":
        """Import files that other programs wrote, in a format of docs/interop.md; return a report for each file.

        env: environment of records that name none, by default the task or the format's name. tokenizer: folder, Hugging
        Face id or URL of the tokenizer for texts, by default the run's. model: another location of the run's model. A
        second import of a file changes nothing. Raises ConfigError for an unknown format or a foreign file.
        """
        from ludic.adapters.imports.importing import import_files

        paths = [files] if isinstance(files, str | PathLike) else files
        options = {"env": env, "tokenizer": tokenizer, "model": model}
        return import_files(self._writable(), [fspath(path) for path in paths], format, **options, track=track)

    def _writable(self, is_needed: bool = True) -> Root:
        """Return the root; checks first that its filesystem refuses to overwrite, if it is written to."""
        return Root.open(self.url, writable=True) if is_needed else self.root


def open_run(url: str | PathLike[str]) -> Run:
    """Open the run at a folder or URL. Raises MissingRootError if there is none, SchemaError if run.json is damaged."""
    return Run(Root.open(fspath(url)))


def create(
    url: str | PathLike[str],
    *,
    model: str | PathLike[str] | None = None,
    env: str | Sequence[str] | None = None,
    like: "str | PathLike[str] | Run | None" = None,
    trust_code: bool = False,
    update_code: bool = False,
    **settings: Any,
) -> Run:
    """Create a run at a folder or URL, or open the existing one with the same settings.

    model: folder, Hugging Face id or URL of the first weights. env: environments, by name or path/to/file.py:Class.
    settings: fields of RunConfig. like: a run whose settings and code the new run shares, and its model if `model` is
    None. trust_code: agree to run the code that an existing root names, from now on. update_code: use users' files as
    they are on this machine now, and store them in the root.

    Raises ConfigError if the settings differ from those of the existing run or an environment does not load, ModelError
    if there is no such model, and ConsentError for code that the user has not agreed to run.
    """
    from ludic.launch.roots import create_run, prepare_run_code, start_like
    from ludic.training.config import TrainConfig

    model = None if model is None else fspath(model)
    if like is not None:
        if env is not None or settings:
            raise ConfigError("like gives the settings of the run; leave out env and settings, or leave out like")
        root = start_like(fspath(url), like.root if isinstance(like, Run) else Root.open(fspath(like)), model)
        if trust_code or update_code:
            prepare_run_code(root, TrainConfig(), CodeSettings(trust_code=trust_code, update_code=update_code))
        return Run(root)
    if model is None or env is None:
        raise ConfigError("model and env are missing: ludic.create(url, model=..., env=...), or like=RUN")
    check_names(settings, RunConfig, "setting of a run")
    config = RunConfig(model=model, env=(env,) if isinstance(env, str) else tuple(env), **settings)
    code = CodeSettings(trust_code=trust_code, update_code=update_code)
    return Run(create_run(fspath(url), config, TrainConfig(), code))
