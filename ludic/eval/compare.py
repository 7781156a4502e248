"""Compare evaluations in pairs: compute the difference between a baseline and other sides on the same examples.

Reads evals/ and evaluations/ of each side's root. Warns if prompts, settings or the code that scored differ. Raises
ConfigError if a side has no samples, or two sides share no environment or example (ludic.eval.pairing).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import duckdb
import numpy as np

from ludic.errors import ConfigError
from ludic.eval import statistics
from ludic.eval.config import DIFFERENCE, LATEST, MeasureConfig
from ludic.eval.estimates import Chosen, Samples, nothing_stored, parts
from ludic.eval.pairing import (
    Examples,
    SampledEnvironment,
    comparable_name,
    comparable_options,
    pair_environments,
    pair_examples,
)
from ludic.records import REWARD_DIGITS
from ludic.root import EVALUATIONS, EvaluationRecord, Root, from_dicts, is_questions
from ludic.root.sql import Connections, SqlText, check_measure_parameters, figure, load_measure

_DEFAULT = ("mean_reward",)
_EQUAL = 10.0**-REWARD_DIGITS
"""Maximum difference of two means that count as equal, since sums of rewards are rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison: a version of a root."""

    root: Root
    version: int | None = None
    """Version of the weights; None is the newest version with samples."""


def parse_sides(texts: Sequence[int | str], root: Root | None = None) -> list[Side]:
    """Parse sides: ROOT@VERSION, ROOT (its newest version with samples), or VERSION or @VERSION of the previous root.

    VERSION is a number or latest. root: that of a first side without one; its newest version with samples is the
    baseline of a single side that is another root's. Raises ConfigError for fewer than two sides, MissingRootError for
    a root that does not exist.
    """
    if len(texts) == 1 and root is not None and _split(str(texts[0]))[0]:
        texts = [LATEST, *texts]
    if len(texts) < 2:
        raise ConfigError(
            f"there is nothing to compare {texts[0] if texts else 'nothing'} with; wanted two or more sides"
        )
    sides: list[Side] = []
    for text in texts:
        url, version = _split(str(text))
        if url:
            root = Root.open(url)
        elif root is None:
            folder = "" if str(text).startswith("@") else f"; a folder of that name is ./{text}"
            raise ConfigError(f"{text} names no root, wanted ROOT@VERSION for the first side{folder}")
        sides.append(Side(root=root, version=version))
    return sides


def is_version(text: int | str) -> bool:
    """Return whether a side names a version: VERSION, latest, @VERSION or ROOT@VERSION; other sides are whole runs."""
    url, version = _split(str(text))
    return not url or version is not None or str(text).endswith(f"@{LATEST}")


def _split(text: str) -> tuple[str, int | None]:
    """Return the URL, empty for none, and the version of a side."""
    if text == LATEST or text.isdecimal():
        return "", None if text == LATEST else int(text)
    url, at, version = text.rpartition("@")
    if at and (version == LATEST or version.isdecimal()):
        return url, None if version == LATEST else int(version)
    return text, None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A side with a connection."""

    root: Root
    con: duckdb.DuckDBPyConnection
    version: int
    sampled: Mapping[str, Sequence[str | None]]
    """Evaluations of each environment, the newest first."""

    @property
    def label(self) -> str:
        return f"{self.root.url}@{self.version}"

    def as_sampled(self, env: str, evaluation: str | None) -> SampledEnvironment:
        return SampledEnvironment(
            name=env, record=None if evaluation is None else EVALUATIONS.read(self.root, evaluation)
        )

    def environments(self) -> list[SampledEnvironment]:
        """Its environments, each with its newest evaluation."""
        return [self.as_sampled(env, evaluations[0]) for env, evaluations in self.sampled.items()]

    def samples(self, env: str, evaluation: str | None) -> Samples:
        chosen = Chosen(versions=[self.version], envs=[env], evaluations=[evaluation])
        return Samples.choose(self.root, self.con, chosen)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compared:
    """Differences between a baseline and other sides, with warnings."""

    rows: Sequence[Mapping[str, Any]]
    """One row for each other side, environment, measure and part."""
    examples: Sequence[Mapping[str, Any]]
    """One row for each of these and example that both sides have: the means of both sides, and their difference."""
    warnings: Sequence[str] = field(default_factory=tuple)
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why a run is not compared, by its URL (`compare_runs`); that of the first one: nothing is."""


def compare(
    baseline: Side,
    others: Sequence[Side],
    config: MeasureConfig,
    *,
    env: Sequence[str] = (),
    evaluation: str | None = None,
    difference: float = DIFFERENCE,
    seed: int = 0,
    connections: Connections | None = None,
) -> Compared:
    """Compare each of the others with the baseline, in every environment that both have, whatever its name.

    env: environments to compare; none are all. evaluation: id of the settings to compare; None takes the newest that
    both sides were sampled with, or the newest of each. difference: the difference to detect, for power and the number
    of examples. seed: of the permutation test. connections: those to use.
    """
    with ExitStack() as stack:
        connections = connections or stack.enter_context(Connections())
        _check_any(connections, [baseline, *others])
        comparing = _Comparing.of(connections, baseline, config, env, evaluation, difference, seed)
        labels = [comparing.add(connections, other) for other in others]
    if not comparing.rows:
        raise ConfigError(comparing.nothing_in_common(labels[0]))
    return comparing.compared()


def compare_runs(
    roots: Sequence[Root],
    config: MeasureConfig,
    connections: Connections,
    *,
    env: Sequence[str] = (),
    evaluation: str | None = None,
    difference: float = DIFFERENCE,
    seed: int = 0,
) -> Compared:
    """Compare the newest evaluated version of each run with that of the first one, where both have the same examples.

    As `compare`, but a run that can't be compared is in `left_out`; `rows` is empty if none can.
    """
    first, *others = roots
    try:
        comparing = _Comparing.of(connections, Side(root=first), config, env, evaluation, difference, seed)
    except ConfigError as error:
        return Compared(rows=[], examples=[], left_out={first.url: str(error)})
    left_out = {}
    for root in others:
        before = len(comparing.rows)
        try:
            label = comparing.add(connections, Side(root=root))
        except ConfigError as error:
            left_out[root.url] = str(error)
        else:
            if len(comparing.rows) == before:
                left_out[root.url] = comparing.nothing_in_common(label)
    return replace(comparing.compared(), left_out=left_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparing:
    """Comparison of sides with a baseline, as far as it has come."""

    first: "_Opened"
    config: MeasureConfig
    env: Sequence[str]
    evaluation: str | None
    difference: float
    seed: int
    measures: Sequence[SqlText]
    rows: list[dict[str, Any]] = field(default_factory=list)
    examples: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        connections: Connections,
        baseline: Side,
        config: MeasureConfig,
        env: Sequence[str],
        evaluation: str | None,
        difference: float,
        seed: int,
    ) -> "_Comparing":
        measures = [load_measure(name) for name in config.measures or _DEFAULT]
        check_measure_parameters(measures, config.params)
        own = {"env": env, "evaluation": evaluation, "difference": difference, "seed": seed}
        return cls(first=_open(connections, baseline), config=config, measures=measures, **own)  # type: ignore[arg-type]

    def add(self, connections: Connections, side: Side) -> str:
        """Compare a side with the baseline in every environment that both have, and return the side's label.

        Raises ConfigError if they have no environment in common.
        """
        first, other = self.first, _open(connections, side)
        for names in _common_envs(first, other, self.env):
            a, b = _common_evaluation(first, other, names, self.evaluation)
            sampled = first.as_sampled(names[0], a.evaluation), other.as_sampled(names[1], b.evaluation)
            how = pair_examples(*sampled, a, b)
            self.warnings.extend(f"{other.label}, {names[1]}: {text}" for text in find_differences(a, b, names, how))
            keys: dict[str, str | None] = {"a": first.label, "b": other.label}
            keys |= {"env_name": names[0], "env_name_b": names[1]}
            keys |= {"evaluation_a": a.evaluation, "evaluation_b": b.evaluation}
            for measure in self.measures:
                for pairs in _pairs(measure, self.config.params, a, b, keys, how):
                    self.rows.append(_row(pairs, self.config.confidence, self.difference, self.seed))
                    self.examples.extend(pairs.rows())
        return other.label

    def nothing_in_common(self, label: str) -> str:
        """Return an error message for a side whose examples are all others. label: of the side."""
        return f"{self.first.label} and {label} have no example in common; evaluate them with one --seed"

    def compared(self) -> Compared:
        """Return the result, with p-values that are corrected over all rows."""
        _correct(self.rows)
        return Compared(rows=self.rows, examples=self.examples, warnings=self.warnings)


def _correct(rows: Sequence[dict[str, Any]]) -> None:
    """Add p-values corrected by Holm's method over all rows that are tested; None for the others."""
    tested = [row for row in rows if row["p_value"] is not None]
    exact = [row["p_value"] for row in tested]
    mid = [row["p_value"] if row["p_mid"] is None else row["p_mid"] for row in tested]
    for row in rows:
        row["p_holm"] = row["p_mid_holm"] = None
    for row, p_holm, p_mid_holm in zip(tested, statistics.holm(exact), statistics.holm(mid), strict=True):
        row["p_holm"], row["p_mid_holm"] = p_holm, None if row["p_mid"] is None else p_mid_holm


def _check_any(connections: Connections, sides: Sequence[Side]) -> None:
    """Raise ConfigError if several roots have no evaluation at all."""
    count = "select count(*) from (select 1 from eval_episodes limit 1)"
    urls = dict.fromkeys(side.root.url for side in sides if not connections.to(side.root).sql(count).fetchall()[0][0])
    if len(urls) > 1:
        commands = " and ".join(f"`ludic eval {url}`" for url in urls)
        raise ConfigError(f"{' and '.join(urls)} have no evaluations to compare; {commands} sample them")


def _open(connections: Connections, side: Side) -> _Opened:
    con = connections.to(side.root)
    version = side.version
    if version is None:
        (version,) = con.execute("select max(version) from eval_episodes").fetchall()[0]
    sampled: dict[str, list[str | None]] = {}
    for env, evaluation, _ in con.execute(figure("evaluations_of_version"), {"version": version}).fetchall():
        sampled.setdefault(env, []).append(evaluation)
    if version is None or not sampled:
        wanted = None if version is None else [version]
        raise ConfigError(nothing_stored(con, side.root, Chosen(versions=wanted)))
    return _Opened(root=side.root, con=con, version=version, sampled=sampled)


def _common_envs(first: _Opened, other: _Opened, wanted: Sequence[str]) -> list[tuple[str, str]]:
    """Return the names, there and here, of environments that both sides have."""
    common = pair_environments(first.environments(), other.environments())
    if wanted:
        common = [names for names in common if any(name in wanted for name in names)]
    for name in wanted:
        if not any(name in names for names in common):
            side = other if name in first.sampled else first
            raise ConfigError(f"{side.label} has no evaluation of {name!r}; it has {', '.join(side.sampled)}")
    if not common:
        raise ConfigError(
            f"{first.label} and {other.label} have no environment in common: {', '.join(first.sampled)} there, "
            f"{', '.join(other.sampled)} here"
        )
    return common


def _common_evaluation(
    first: _Opened, other: _Opened, envs: tuple[str, str], wanted: str | None
) -> tuple[Samples, Samples]:
    """Return the samples of both sides to compare in an environment."""
    a, b = first.sampled[envs[0]], other.sampled[envs[1]]
    if wanted is not None:
        for side, env in zip((first, other), envs, strict=True):
            if wanted not in side.sampled[env]:
                raise ConfigError(f"{side.label} has no evaluation {wanted!r} of {env}; view evaluations lists them")
    common = wanted or next((evaluation for evaluation in a if evaluation is not None and evaluation in b), None)
    return first.samples(envs[0], common or a[0]), other.samples(envs[1], common or b[0])


# --- Pairs of the examples that both sides have --------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pairs:
    """Means of a measure's part over the examples that both sides have."""

    keys: Mapping[str, Any]
    example_ids: Sequence[tuple[str, str]]
    """The ids that both sides have for an example."""
    a: np.ndarray
    b: np.ndarray
    is_binary: bool
    """True if each example has one value on each side, 0 or 1."""
    is_share: bool
    """True if the measure is a share on each side."""
    only: tuple[int, int]
    """Examples that only the baseline has, and that only the other side has."""
    num_missing: tuple[int, int]
    """Number of missing values on each side, for example of episodes that are not scored."""

    def rows(self) -> Iterator[dict[str, Any]]:
        for ids, a, b in zip(self.example_ids, self.a.tolist(), self.b.tolist(), strict=True):
            names = dict(zip(("env_example_id", "env_example_id_b"), ids, strict=True))
            yield {**self.keys, **names, "value_a": a, "value_b": b, "difference": b - a}


def _pairs(
    measure: SqlText,
    params: Mapping[str, Any],
    first: Samples,
    other: Samples,
    keys: Mapping[str, str | None],
    how: Examples,
) -> Iterator[_Pairs]:
    of_a, of_b = (
        {own["part"]: part for own, part in parts(samples.measure(measure, params))} for samples in (first, other)
    )
    k = measure.bind(params).get("k")
    for part in sorted(of_a.keys() & of_b.keys(), key=str):
        a, b = of_a[part], of_b[part]
        a_means, b_means = (dict(zip(each.example_ids, each.means.tolist(), strict=True)) for each in (a, b))
        common = list(how.common(a_means, b_means))
        if common:
            yield _Pairs(
                keys={**keys, "measure": measure.name, "k": k, "part": part},
                example_ids=common,
                a=np.array([a_means[example] for example, _ in common]),
                b=np.array([b_means[example] for _, example in common]),
                is_binary=a.is_binary and b.is_binary,
                is_share=a.is_share and b.is_share,
                only=(len(a_means) - len(common), len(b_means) - len(common)),
                num_missing=(a.num_missing, b.num_missing),
            )


def _row(pairs: _Pairs, confidence: float, difference: float, seed: int) -> dict[str, Any]:
    differences, size = pairs.b - pairs.a, len(pairs.a)
    differences[np.abs(differences) <= _EQUAL] = 0  # means of rounded rewards
    found, p_value, p_mid = statistics.clustered(differences, confidence), None, None
    gains, losses = int(np.sum(differences > 0)), int(np.sum(differences < 0))
    if size >= statistics.FEWEST_EXAMPLES:  # fewer say nothing: one pair gives -0.95 to 0.95
        if pairs.is_share:
            found = found.within(-1, 1)
            if found.low is None and np.ptp(differences) <= _EQUAL:
                found = statistics.equal_differences(float(differences.mean()), size, confidence)
        if pairs.is_binary:
            p_value, p_mid = statistics.mcnemar(gains, losses), statistics.mcnemar_mid_p(gains, losses)
        else:
            p_value = statistics.permutation(differences, seed=seed)
    power = statistics.power(differences, difference, confidence, is_binary=pairs.is_binary, seed=seed)
    return {
        **pairs.keys,
        "estimate_a": float(pairs.a.mean()),
        "estimate_b": float(pairs.b.mean()),
        "difference": found.estimate,
        "std_error": found.std_error,
        "low": found.low,
        "high": found.high,
        "test": "mcnemar" if pairs.is_binary else "permutation",
        "p_value": p_value,
        "p_mid": p_mid,
        "num_gains": gains,
        "num_losses": losses,
        "num_examples": size,
        "num_only_a": pairs.only[0],
        "num_only_b": pairs.only[1],
        "num_missing_a": pairs.num_missing[0],
        "num_missing_b": pairs.num_missing[1],
        "power": power.power,
        "examples_needed": power.examples_needed,
    }


# --- Warnings: settings, code that scored, or prompts that differ --------------------------------------


def find_differences(a: Samples, b: Samples, names: tuple[str, str], how: Examples) -> list[str]:
    """Return warnings about the samples of the baseline (a) and another side (b).

    names: of the environment there and here. how: examples are paired.
    """
    found = [*how.warnings, *_of_prompts(a, b, how)]
    of_a, of_b = _record(a), _record(b)
    if of_a is None or of_b is None:
        found.append("not both were sampled by `ludic eval`, so the code that scored them can't be compared")
        return [*found, *_of_sampling(a, b)]
    return [*found, *_of_settings(of_a.settings, of_b.settings), *_of_code(of_a, of_b, names)]


def _record(samples: Samples) -> EvaluationRecord | None:
    return None if samples.evaluation is None else EVALUATIONS.read(samples.root, samples.evaluation)


def _of_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted((a.keys() | b.keys()) - {"example_ids"}):  # pair_examples reports it
        of_a, of_b = a.get(name), b.get(name)
        if name == "env_options":
            of_a, of_b = comparable_options(of_a), comparable_options(of_b)
        if of_a != of_b:
            yield f"{name} is {json.dumps(of_a)} in the baseline, {json.dumps(of_b)} here"


def _of_code(a: EvaluationRecord, b: EvaluationRecord, names: tuple[str, str]) -> Iterator[str]:
    """Compare the code of both sides by role and name. names: of the environment, which may differ."""
    of_a, of_b = (
        {
            (record.role, names[0] if record.name == name else comparable_name(record.name)): record
            for record in from_dicts(each.code)
        }
        for each, name in zip((a, b), names, strict=True)
    )
    for key in sorted(of_a.keys() & of_b.keys()):
        if of_a[key].digests != of_b[key].digests:
            what = "held other rows" if is_questions(key[1]) else "was another version of its code"
            yield f"the {key[0]} {key[1]!r} {what} in the baseline"


def _of_sampling(a: Samples, b: Samples) -> Iterator[str]:
    of_a, of_b = (each.ask(figure("sampling_settings")).to_pylist() for each in (a, b))
    if of_a != of_b:
        yield f"sampled with {json.dumps(of_a)} in the baseline, {json.dumps(of_b)} here"


def _of_prompts(a: Samples, b: Samples, how: Examples) -> Iterator[str]:
    of_a, of_b = (
        {row["env_example_id"]: row["digest"] for row in each.ask(figure("prompt_digests")).to_pylist()}
        for each in (a, b)
    )
    common = list(how.common(of_a, of_b))
    num = sum(of_a[one] != of_b[other] for one, other in common)
    if num:
        yield f"the prompts of {num} of {len(common)} examples differ"
