"""Stored evaluations and comparisons as a page shows them: tables, plots over versions, and examples with answers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ludic.eval import compare as comparing
from ludic.eval.config import MeasureConfig
from ludic.eval.numbers import Chosen, numbers, stored_versions
from ludic.show.evaluations import Evaluation, facts_of, measure_title, side_name
from ludic.show.report.conversations import read_conversations, split_answer
from ludic.show.report.plots import Figure, Series, draw
from ludic.sql.connect import Connections
from ludic.sql.query import ask
from ludic.store import Root

_DIFFERENCE = 0.05
"""The difference that should be found, for power: the default of `ludic eval compare`."""
_MOST_EXAMPLES = 4
"""Number of gained examples, and of lost examples, of each comparison."""
_KEYS = ("a", "b", "env_name", "measure", "k", "part")
_ANSWERS = """
with samples as (
    select
        rollout_id, env_example_id, version, reward, error, sample_index,
        avg(reward) over (partition by env_example_id) as reward_mean,
        count(*) over (partition by env_example_id) as num_samples
    from eval_episodes
    where
        version = $version and env_name = $env and coalesce(evaluation, '') = $evaluation
        and env_example_id in (select unnest($examples::varchar[]))
)
from samples
qualify row_number() over (
    partition by env_example_id order by abs(reward - reward_mean) nulls last, sample_index, rollout_id
) = 1
"""

Row = Mapping[str, Any]


def evaluation_section(
    connections: Connections, root: Root, versions: str | None, config: MeasureConfig
) -> dict[str, Any] | None:
    """Return the figures of stored evaluations; None if none are stored and none are asked for."""
    chosen = stored_versions(connections.to(root), root, versions)
    if not chosen:
        return None
    found = numbers(root, config, Chosen(versions=chosen), connections=connections)
    shown = Evaluation(url=root.url, numbers=found, confidence=config.confidence)
    measures = [{**row, "title": measure_title(row)} for row in found.rows]
    figures = list(_measure_figures(measures, config.confidence))
    return {**shown.to_dict(), "measures": measures, "versions": chosen, "figures": figures}


def comparison_section(
    connections: Connections, root: Root, sides: Sequence[str], config: MeasureConfig
) -> dict[str, Any]:
    """Compare sides in pairs, with the defaults of `ludic eval compare`. Raises ConfigError.

    Each row has its facts, and the examples that gained and lost most.
    """
    parsed = comparing.parse_sides(sides, root)
    roots = {side.root.url: side.root for side in parsed}
    compared = comparing.compare(parsed[0], parsed[1:], config, difference=_DIFFERENCE, connections=connections)
    rows = []
    for row in compared.rows:
        own = [example for example in compared.examples if all(example[key] == row[key] for key in _KEYS)]
        ranked = sorted(own, key=lambda example: (-abs(example["difference"]), example["env_example_id"]))
        changed = {
            "gained": [example for example in ranked if example["difference"] > 0][:_MOST_EXAMPLES],
            "lost": [example for example in ranked if example["difference"] < 0][:_MOST_EXAMPLES],
        }
        shown = [example["env_example_id"] for some in changed.values() for example in some]
        answers = {side: _answers(connections, roots, row, side, shown) for side in ("a", "b")}
        rows.append(
            {
                **row,
                "side": side_name(row),
                "title": measure_title(row),
                "facts": ", ".join(facts_of(row, _DIFFERENCE)),
                "changed": {name: [_both(example, answers) for example in some] for name, some in changed.items()},
            }
        )
    return {"rows": rows, "warnings": compared.warnings, "confidence": config.confidence}


def _both(example: Row, answers: Mapping[str, Mapping[str, Row]]) -> dict[str, Any]:
    """Return an example with both sides' answers, and the messages before them if both have the same."""
    sides = [dict(answers[side].get(example["env_example_id"], {"messages": []})) for side in ("a", "b")]
    split = [split_answer(side["messages"]) for side in sides]
    prompt = split[0][0] if split[0][0] == split[1][0] else []
    for side, (_, answer) in zip(sides, split, strict=True):
        side["messages"] = answer if prompt else side["messages"]
    return {**example, "prompt": prompt, "sides": sides}


def _answers(
    connections: Connections, roots: Mapping[str, Root], row: Row, side: str, examples: Sequence[str]
) -> dict[str, Row]:
    """Return, by example, the sample of a side whose reward is nearest to the mean, with its messages."""
    if not examples:
        return {}
    url, _, version = row[side].rpartition("@")
    root = roots[url]
    con = connections.to(root)
    params = {"version": int(version), "env": row["env_name"], "evaluation": row[f"evaluation_{side}"] or ""}
    found = ask(con, root, _ANSWERS, {**params, "examples": list(examples)})
    texts = read_conversations(con, root, "evals", {each["rollout_id"]: each["version"] for each in found})
    return {each["env_example_id"]: {**each, "messages": texts.get(each["rollout_id"], [])} for each in found}


def _measure_figures(rows: Sequence[Row], confidence: float) -> Iterator[Figure]:
    """Yield a plot over versions for each measure that changes, with a line for each environment and evaluation."""
    evaluations = {(row["env_name"], row["evaluation"]) for row in rows}
    has_several = len(evaluations) > len({env for env, _ in evaluations})
    for title in dict.fromkeys(row["title"] for row in rows):
        of_measure = [row for row in rows if row["title"] == title]
        if len({row["estimate"] for row in of_measure}) < 2 or len({row["policy_version"] for row in of_measure}) < 2:
            continue
        lines: dict[str, list[Row]] = {}
        for row in of_measure:
            name = f"{row['env_name']} {row['evaluation'] or 'imported'}" if has_several else row["env_name"]
            lines.setdefault(name, []).append(row)
        series = [
            Series(
                name=name,
                values={row["policy_version"]: row["estimate"] for row in of_line},
                intervals={row["policy_version"]: (row["low"], row["high"]) for row in of_line},
            )
            for name, of_line in lines.items()
        ]
        yield draw(title, f"{100 * confidence:g}% intervals", "version", series)
