"""Render a run, its stored evaluations and a comparison as one HTML file.

Stored text is hostile: the template escapes every value, control characters are spelt out, and the page's policy
forbids scripts and requests. Figures are aggregated in SQL (ludic/root/sql/figures/). Raises ConfigError for versions
or sides without samples, and for an output that exists or can't be written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

import duckdb

from ludic.app.show.evaluations import Comparison, Evaluation, facts_of, measure_title, side_name
from ludic.app.show.figures import (
    COLOURS,
    DARK_COLOURS,
    ENVIRONMENT,
    FigureData,
    evaluation_figures,
    read_diagnostics,
    read_figures,
)
from ludic.app.show.html import templates
from ludic.app.show.report.plots import draw
from ludic.app.show.runs import summarise
from ludic.app.show.stats import (
    describe_lost,
    describe_run,
    describe_superseded,
    describe_trainer,
    extremes,
    means_frames,
    rewards_frame,
)
from ludic.base import (
    LUDIC,
    Frame,
    Part,
    Result,
    installed_version,
    local_path,
    number,
    of_total,
    open_sink,
    size,
    sparkline,
)
from ludic.errors import ConfigError
from ludic.eval import DIFFERENCE, Chosen, MeasureConfig, numbers, stored_versions
from ludic.eval import compare as comparing
from ludic.records import Row
from ludic.root import Root, newest_attempt
from ludic.root.rows import Folder
from ludic.root.sql import (
    Connections,
    ask,
    figure,
    read_reports,
)
from ludic.run import is_recorded_run, run_of

MessageValues = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report(Result):
    """A report as HTML. A notebook shows it in a frame of its own."""

    html: str
    location: str | None
    """The written file; None if none was requested."""

    def to_dict(self) -> dict[str, Any]:
        """Return the place and size of the page."""
        return {"location": self.location, "size_bytes": len(self.html.encode())}

    def parts(self) -> Iterator[Part]:
        """A sentence."""
        yield f"{self.location or 'a page'}: {size(len(self.html.encode()))}, one file without scripts or requests"

    def _repr_html_(self) -> str:
        frame = 'sandbox style="width: 100%; height: 48em; border: 1px solid gray"'
        return f'<iframe srcdoc="{escape(self.html)}" {frame}></iframe>'


def make_report(
    root: Root,
    output: str | None,
    *,
    by: str | None = None,
    versions: str | None,
    sides: Sequence[str],
    measure: MeasureConfig,
    overwrite: bool,
) -> Report:
    """Render a report and write it. output: a path of this machine; None writes nothing. See `Run.report`."""
    return write_page(output, overwrite, lambda: render(gather(root, versions, sides, measure, by)))


def write_page(output: str | None, overwrite: bool, make: Callable[[], str]) -> Report:
    """Return a page, and write it. output: as in `make_report`."""
    path = checked_output(output, overwrite)
    with nullcontext() if path is None else open_sink(path) as file:  # first, since gathering a run may take minutes
        html = make()
        if file is not None:
            file.write(html.encode())
    return Report(html=html, location=None if path is None else str(path))


def checked_output(output: str | None, overwrite: bool) -> Path | None:
    """Return the file to write; None without one. Raises ConfigError for a folder, or a file that exists."""
    path = None if output is None else local_path(output, "output")
    if path is not None and path.is_dir():
        raise ConfigError(f"{path} is a folder, wanted a file such as {path / 'report.html'}")
    if path is not None and path.exists() and not overwrite:
        raise ConfigError(f"{path} exists; choose another output, or replace it with --overwrite")
    return path


def gather(
    root: Root, versions: str | None, sides: Sequence[str], measure: MeasureConfig, by: str | None = None
) -> dict[str, Any]:
    """Return the values that the template shows. by: column by which the curves have lines; None is the environment."""
    with Connections() as connections:
        con = connections.to(root)
        diagnostics = read_diagnostics(con, root)
        data = read_figures(con, root, diagnostics, by=by)
        figures = [draw(each) for each in _first_first(data, by or ENVIRONMENT)]
        reports = {name: table.to_pylist() for name, table in read_reports(con, root).items()}
        found = evaluation_section(connections, root, versions, measure)
        comparison = _compare(connections, root, found["versions"] if found else [], sides, measure)
        facts = _facts(con, root, reports)
        return {
            **about_page(),
            "root": root.url,
            "head": _head(root, facts, data, comparison),
            "facts": facts,
            "diagnostics": list(map(str, diagnostics)),
            "is_marked": any(it.marks for it in figures),
            "totals": reports["rollouts"][0],
            "steps": reports["steps"][0],
            "superseded": describe_superseded(reports["steps"][0]),
            "figures": figures,
            "tables": [
                *training_tables(reports, ask(con, root, figure("errors"), {"most": _MOST_ERRORS})),
                *([] if by is None else [rewards_frame(con, root, by)]),
                *_other_metrics(ask(con, root, figure("other_metrics"))),
            ],
            "groups": read_groups(con, root),
            "evaluation": found,
            "comparison": comparison,
        }


def about_page() -> dict[str, Any]:
    """Return the values that any page shows: when it was made, by which ludic, its colours."""
    return {
        "made_at": datetime.now(UTC),
        "ludic_version": installed_version(LUDIC),
        "colours": COLOURS,
        "dark_colours": DARK_COLOURS,
    }


# --- The head: what a reader asks first ------------------------------------------------------------------------------

STATE_CLASSES = {"training": "good", "finished": "good", "failed": "bad", "unreadable": "bad"}
_MOST_NAMES = 3
"""Number of environments that the head names."""
_FEW_STEPS = 5
"""Number of first and of last steps whose rewards the head averages."""
_MOST_P = 0.05
"""Highest p-value, corrected by Holm, with which the head calls a version better or worse."""


_REWARD = "mean_reward"


def _first_first(data: Sequence[FigureData], by: str) -> list[FigureData]:
    """Return the figures with the most telling one in front: the reward by a column, if it has several values."""
    chosen = [each for each in data if each.name == f"reward_mean/{by}"]
    return [*chosen, *(each for each in data if each not in chosen)]


def _head(
    root: Root, facts: Mapping[str, str], data: Sequence[FigureData], comparison: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the place, name and state of a run, and its facts: model, algorithm, reward, evaluation."""
    (summary,) = summarise([root.url])
    place, name = split_place(root.url)
    trainer = facts.get("algorithm") or facts.get("trainer") or "no trainer yet"
    problem = f": {summary.problem}" if summary.problem else ""
    return {
        "place": place,
        "name": name,
        "state": f"{summary.state}, step {of_total(summary.step, summary.num_steps)}{problem}",
        "state_class": STATE_CLASSES.get(summary.state, ""),
        "facts": [f"{facts['model']}, {trainer} on {_named(run_of(root).env)}", _rewards(data), _verdict(comparison)],
    }


def split_place(url: str) -> tuple[str, str]:
    """Return the folder of a root with its slash, and the root's name in it."""
    place, slash, name = url.rstrip("/").rpartition("/")
    return place + slash, name


def _named(names: Sequence[str]) -> str:
    left = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {left:,} more" if left > 0 else "")


def _rewards(data: Sequence[FigureData]) -> str:
    """Return the mean reward of the first and of the last steps."""
    values = [each.series[0].values for each in data if each.name == "reward_mean" and each.series]
    rewards = [value for step, value in sorted(values[0].items()) if value is not None] if values else []
    if not rewards:
        return "no step has a reward"
    few = min(_FEW_STEPS, max(1, len(rewards) // 2))
    means = (number(fmean(some), 3) for some in (rewards[:few], rewards[-few:]))
    return f"reward {' → '.join(means)} ({'first and last step' if few == 1 else f'means of {few} steps'})"


def _verdict(comparison: Mapping[str, Any] | None) -> str:
    """Return how the last side of the comparison does against its baseline, by its first measure."""
    if comparison is None:
        return "no evaluations to compare"
    if not comparison["rows"]:
        return "evaluations can't be compared"
    first, last = comparison["rows"][0], comparison["rows"][-1]
    rows = [row for row in comparison["rows"] if (row["b"], row["title"]) == (last["b"], first["title"])]
    judged: dict[str, list[str]] = {}
    for row in rows:
        judged.setdefault(_judgement(row), []).append(row["env_name"])
    is_own = last["side"] != last["b"]  # of the baseline's run: its version alone
    sides = f"evaluation {last['side']} against {'@' + last['a'].rpartition('@')[2] if is_own else last['a']}"
    if len(judged) == 1:
        return f"{sides}: {next(iter(judged))}"
    return f"{sides}: " + ", ".join(f"{word} in {_named(names)}" for word, names in judged.items())


def _judgement(row: Row) -> str:
    if row["p_holm"] is None or row["p_holm"] > _MOST_P:
        return "no clear difference"
    if row["measure"] != _REWARD:  # of a length or a share of failures, less may be better
        return f"{row['title']} is {'higher' if row['difference'] > 0 else 'lower'}"
    return "better" if row["difference"] > 0 else "worse"


def _facts(con: duckdb.DuckDBPyConnection, root: Root, reports: Mapping[str, Sequence[Row]]) -> dict[str, str]:
    """Return the settings of the run and of its newest trainer, the engines that sampled, and the losses of
    recorders."""
    lost = "; ".join(map(describe_lost, reports["lost"]))
    attempt = newest_attempt(root)
    engines = [row["engine"] for row in ask(con, root, figure("engines"))]
    return {
        **describe_run(
            {"root": root.url, "run_id": root.run_id, "run": asdict(run_of(root)), "steps": reports["steps"][0]},
            is_recorded=is_recorded_run(root),
        ),
        **({"engine": ", ".join(engines)} if engines else {}),
        **(describe_trainer(attempt.config, reports["steps"][0]["last_step"]) if attempt is not None else {}),
        **({"not stored": lost} if lost else {}),
    }


def _compare(
    connections: Connections, root: Root, versions: Sequence[int], sides: Sequence[str], measure: MeasureConfig
) -> dict[str, Any] | None:
    """Return the comparison of the sides; without sides, that of the last of the evaluated versions with the first."""
    if sides:
        return comparison_section(connections, root, sides, measure)
    if len(versions) < 2:
        return None
    try:
        return comparison_section(connections, root, [f"{versions[0]}", f"{versions[-1]}"], measure)
    except ConfigError as error:  # the versions have no example in common
        return {"rows": [], "warnings": [str(error)]}


def render(values: Mapping[str, Any], template: str = "page.html.j2") -> str:
    """Return a page."""
    return templates("report").get_template(template).render(values).lstrip()


# --- Training: plots of steps, warnings, errors, and the best and the worst groups -----------------------------------

_NUM_GROUPS = 3
"""Number of best groups, and of worst groups, of each environment."""
_FEW_ENVIRONMENTS = 4
"""Number of environments above which a report has one best and one worst group of each."""
_MOST_ERRORS = 8
_CURVE_WIDTH = 30
"""Characters of a curve in a table."""


def training_tables(reports: Mapping[str, Sequence[Row]], errors: Sequence[Row]) -> Iterator[Frame]:
    """Yield the tables of training that have rows: drops, environments, and the most frequent errors of rollouts."""
    (steps,), drops = reports["steps"], reports["drops"]
    num_considered = steps["num_used"] + steps["num_dropped"]
    if drops:
        rows = [{**row, "dropped_fraction": row["num_rollouts"] / num_considered} for row in drops]
        shown = ("reason", "num_rollouts", "dropped_fraction")
        yield Frame("drops", rows, shown, most=len(rows), heading="Drops by reason")
    yield from means_frames("environments", reports["environments"], "Environments")
    if errors:
        columns = ("num_rollouts", "env_name", "last_version", "error")
        yield Frame("errors", errors, columns, heading="Errors of rollouts")


def _other_metrics(rows: Sequence[Row]) -> Iterator[Frame]:
    """Yield a table of the numbers that a recorded trainer logged under its own names; nothing without rows."""
    if rows:
        yield Frame(
            "other",
            rows,
            ("name", "curve", "first_value", "last_value", "lowest", "highest"),
            most=len(rows),
            heading="Other numbers of the trainer, by its own names",
            titles={"first_value": "first", "last_value": "last"},
            derived={"curve": lambda row: sparkline(row["values_by_step"], _CURVE_WIDTH)},
        )


def read_groups(con: duckdb.DuckDBPyConnection, root: Root) -> dict[str, list[dict[str, Any]]]:
    """Return by heading the best and worst groups of each environment, each with its rollouts and two conversations.

    A group of two lists is among the best only. Of equal groups the newest come first.
    """
    groups = ask(con, root, figure("extreme_groups"), {"most": _NUM_GROUPS})
    names = list(dict.fromkeys(group["env_name"] for group in groups))
    most = _NUM_GROUPS if len(names) <= _FEW_ENVIRONMENTS else 1
    groups = [group for group in groups if min(group["best"], group["worst"]) <= most]
    versions = sorted({group["version"] for group in groups})
    params = {"ids": [group["group_id"] for group in groups], "versions": versions}
    rows = ask(con, root, figure("rollouts_of_groups"), params) if groups else []
    found = [{**group, "rollouts": [row for row in rows if row["group_id"] == group["group_id"]]} for group in groups]
    chosen = {row["rollout_id"]: row["version"] for group in found for _, row in extremes(group["rollouts"])}
    texts = read_conversations(con, root, "rollouts", chosen)
    for group in found:
        group["table"] = _rollouts_of(group["rollouts"])
        group["wanted"] = shorten(group["wanted"])
        group["shown"] = [
            {"name": _EXTREMES.get(name, name), "row": row, "messages": texts.get(row["rollout_id"], [])}
            for name, row in extremes(group["rollouts"])
        ]
    listed = {}
    for name in names:
        of = f" of {name}" if len(names) > 1 else ""
        own = [group for group in found if group["env_name"] == name]
        listed[f"Best groups{of}"] = [group for group in own if group["best"] <= most]
        listed[f"Worst groups{of}"] = sorted(
            (group for group in own if group["best"] > most), key=lambda group: group["worst"]
        )
    return listed


_EXTREMES = {"best": "best rollout", "worst": "worst rollout"}


def _rollouts_of(rows: Sequence[Row]) -> Frame:
    """Return a group's rollouts as a table."""

    def agent(row: Row) -> str:
        return row["rollout_id"] if row["agent_id"] == "agent" else f"{row['rollout_id']} {row['agent_id']}"

    def training(row: Row) -> str:
        use = row["use"]
        return "not considered" if use is None else f"step {use['step']}" if use["used"] else use["reason"]

    correct = ["correct"] if any(row["correct"] is not None for row in rows) else []
    return Frame(
        "rollouts",
        rows,
        ("rollout_id", "episode_reward", *correct, "advantage", "response_length", "ending", "training"),
        most=len(rows),
        titles={"ending": "end"},
        derived={
            "rollout_id": agent,
            "advantage": lambda row: row["use"]["advantage"] if row["use"] else None,
            "training": training,
        },
    )


# --- Evaluations and comparisons: tables, plots over versions, and examples with answers -----------------------------

_MOST_EXAMPLES = 4
"""Number of gained examples, and of lost examples, of each comparison."""
_KEYS = ("a", "b", "env_name", "measure", "k", "part")


def evaluation_section(
    connections: Connections, root: Root, versions: str | None, config: MeasureConfig
) -> dict[str, Any] | None:
    """Return the figures of stored evaluations; None if none are stored and none are requested."""
    chosen = stored_versions(connections.to(root), root, versions)
    if not chosen:
        return None
    found = numbers(root, config, Chosen(versions=chosen), con=connections.to(root))
    shown = Evaluation(url=root.url, numbers=found, confidence=config.confidence)
    figures = [draw(data) for data in evaluation_figures(found.rows, config.confidence)]
    tables = {part.name: part for part in shown.parts() if isinstance(part, Frame)}
    of = tables["measures"]
    added = ("num_examples", *(["evaluation"] if "evaluation" not in of.shown else []))
    tables["measures"] = replace(of, shown=(*of.shown, *added))
    return {"tables": tables, "versions": chosen, "figures": figures}


def comparison_section(
    connections: Connections, root: Root, sides: Sequence[str], config: MeasureConfig
) -> dict[str, Any]:
    """Compare sides in pairs, with the defaults of `ludic compare`. Raises ConfigError.

    Each row has its facts, and the examples that gained and lost most; `examples` are all.
    """
    parsed = comparing.parse_sides(sides, root)
    roots = {side.root.url: side.root for side in parsed}
    compared = comparing.compare(parsed[0], parsed[1:], config, difference=DIFFERENCE, connections=connections)
    shown = Comparison(compared=compared, difference=DIFFERENCE, confidence=config.confidence)
    (table,) = [part for part in shown.parts() if isinstance(part, Frame)]
    rows = []
    for row in compared.rows:
        own = [example for example in compared.examples if all(example[key] == row[key] for key in _KEYS)]
        ranked = sorted(own, key=lambda example: (-abs(example["difference"]), example["env_example_id"]))
        changed = {
            "gained": [example for example in ranked if example["difference"] > 0][:_MOST_EXAMPLES],
            "lost": [example for example in ranked if example["difference"] < 0][:_MOST_EXAMPLES],
        }
        examples = [example for some in changed.values() for example in some]
        answers = {side: _answers(connections, roots, row, side, examples) for side in ("a", "b")}
        rows.append(
            {
                **row,
                "side": side_name(row),
                "title": measure_title(row),
                "facts": ", ".join(facts_of(row, DIFFERENCE)),
                "changed": {name: [_both(example, answers) for example in some] for name, some in changed.items()},
            }
        )
    return {"rows": rows, "table": table, "warnings": compared.warnings, "examples": compared.examples}


def _both(example: Row, answers: Mapping[str, Mapping[str, Row]]) -> dict[str, Any]:
    """Return an example with both sides' answers, and the messages before them if both have the same."""
    ids = {"a": example["env_example_id"], "b": example["env_example_id_b"]}
    sides = [dict(answers[side].get(own_id, {"messages": []})) for side, own_id in ids.items()]
    split = [split_answer(side["messages"]) for side in sides]
    prompt = split[0][0] if split[0][0] == split[1][0] else []
    for side, (_, answer) in zip(sides, split, strict=True):
        side["messages"] = answer if prompt else side["messages"]
    wanted = next((side["wanted"] for side in sides if side.get("wanted") is not None), None)
    return {**example, "prompt": prompt, "wanted": shorten(wanted), "sides": sides}


def _answers(
    connections: Connections, roots: Mapping[str, Root], row: Row, side: str, examples: Sequence[Row]
) -> dict[str, Row]:
    """Return, by example, the sample of a side whose reward is nearest to the mean, with its messages."""
    if not examples:
        return {}
    url, _, version = row[side].rpartition("@")
    root = roots[url]
    con = connections.to(root)
    end = "_b" if side == "b" else ""  # the names of the environment and its examples may differ between the sides
    params = {"version": int(version), "env": row[f"env_name{end}"], "evaluation": row[f"evaluation_{side}"] or ""}
    own_ids = [example[f"env_example_id{end}"] for example in examples]
    found = ask(con, root, figure("answers_nearest_mean"), {**params, "examples": own_ids})
    texts = read_conversations(con, root, "evals", {each["rollout_id"]: each["version"] for each in found})
    return {each["env_example_id"]: {**each, "messages": texts.get(each["rollout_id"], [])} for each in found}


# --- Conversations, cut to a length that a page can show -------------------------------------------------------------

_MOST_CHARACTERS = 4_000
"""Characters of each text that are shown, half of them from each end."""
_MOST_MESSAGES = 40


def read_conversations(
    con: duckdb.DuckDBPyConnection, root: Root, folder: Folder, versions: Mapping[str, int]
) -> dict[str, list[MessageValues]]:
    """Return the messages of rollouts by rollout_id. versions: version of each rollout, to read fewer files."""
    if not versions:
        return {}
    params = {"ids": list(versions), "versions": sorted(set(versions.values()))}
    rows = ask(con, root, figure(f"messages_of_{folder}"), params)
    return {row["rollout_id"]: _first_and_last(row["messages"] or []) for row in rows}


def split_answer(messages: Sequence[MessageValues]) -> tuple[Sequence[MessageValues], Sequence[MessageValues]]:
    """Return the messages before the first answer, and the others."""
    first = next((index for index, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return messages[:first], messages[first:]


def _first_and_last(messages: Sequence[MessageValues]) -> list[MessageValues]:
    half = _MOST_MESSAGES // 2
    shown = [_short(message) for message in messages]
    if len(shown) <= _MOST_MESSAGES:
        return shown
    left_out = f"{len(shown) - 2 * half:,} messages left out; `ludic view --text` prints them"
    return [*shown[:half], {"role": "", "name": None, "content": left_out, "calls": []}, *shown[-half:]]


def _short(message: MessageValues) -> MessageValues:
    calls = [
        {"name": call["name"], "arguments": shorten(call["arguments"]), "result": shorten(call["result"])}
        | {"error": call["error"]}
        for call in message["tool_calls"] or []
    ]
    texts = [message.get("reasoning"), message["content"]]
    content = "\n\n".join(shorten(text) for text in texts if text)
    return {"role": message["role"], "name": message["name"], "content": content, "calls": calls}


def shorten(text: str | None) -> str:
    """Replace the middle of a long text by the number of characters that are left out."""
    text = text or ""
    half = _MOST_CHARACTERS // 2
    if len(text) <= 2 * half:
        return text
    left_out = f"… {len(text) - 2 * half:,} characters left out; `ludic view ROOT ID --full` prints them …"
    return f"{text[:half]}\n{left_out}\n{text[-half:]}"
