"""Write the cards of a pushed run: Markdown with the YAML head that the Hub reads.

Texts of runs are hostile: in Markdown each character that could be markup becomes a numeric entity, and in YAML
huggingface_hub quotes it. A long value is shortened, with its length; run.json and attempts/ of the data set have all.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ludic.app import interval_text, measure_title
from ludic.base import number, printable
from ludic.run import RunConfig
from ludic.settings import settings_of
from ludic.training import TrainConfig

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

PICTURE_TITLE = "Curves of the run"
_MARKUP = re.compile(r"[^\w ,.\-/]|(?<!\w)_|_(?!\w)|(?<=www)\.|^-(?= )|^\d(?=\d*\. )", re.IGNORECASE)
"""What Markdown may take for markup, a list, HTML or an address."""
_LONGEST = 500
"""Characters of a setting in a card."""
_FIRST = tuple(
    each.name
    for config in (RunConfig, TrainConfig)
    for each in settings_of(config)
    if each.role.on_card and each.of_choice is None
)
"""Settings that a card shows first; the others are folded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How `datasets` reads a table of the data set."""

    pattern: str
    """Of the files."""
    features: Sequence[Mapping[str, Any]]
    """Names and types of the columns, as in the YAML head of a card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What the cards of a run say about it."""

    repo: str
    """Of the model."""
    dataset_repo: str
    settings: Mapping[str, Any]
    """Of the run and its newest trainer, without secrets and folders of the machine."""
    base_model: str | None
    """Id on the Hub; None for a model that is not from there."""
    license: str | None
    provenance: Mapping[str, Any]
    code: Sequence[Mapping[str, Any]]
    """Rows with `role`, `name` and `sha256`."""
    measures: Sequence[Mapping[str, Any]]
    """Rows of `Numbers`."""
    confidence: float
    picture: str | None
    """File of the curves; None if nothing was trained."""
    configs: Mapping[str, Config] = field(default_factory=dict)
    """By table of the data set, the default one first."""
    has_model: bool = True
    has_dataset: bool = True


def escape(value: Any) -> str:
    """Return a value as Markdown that shows it and nothing else, in one line."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    more = f" ... ({len(text):,} characters)" if len(text) > _LONGEST else ""
    shown = printable(text[:_LONGEST]) + more
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};", shown)


def model_card(facts: CardFacts) -> str:
    """Return README.md of the model."""
    from huggingface_hub import ModelCardData

    name = facts.repo.rpartition("/")[2]
    head = ModelCardData(
        base_model=facts.base_model,
        license=facts.license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["ludic", "reinforcement-learning"],
        datasets=[facts.dataset_repo] if facts.has_dataset else None,
        model_name=name,
        eval_results=list(_results(facts)) or None,
    )
    base = f"from [{escape(facts.base_model)}](https://huggingface.co/{facts.base_model}) " if facts.base_model else ""
    lines = [
        f"# {escape(name)}",
        f"Trained {base}by reinforcement learning with ludic: version {facts.provenance['version']}, of step "
        f"{facts.provenance['step']}.",
    ]
    if facts.has_dataset:
        where = f"https://huggingface.co/datasets/{facts.dataset_repo}"
        lines.append(f"Its rollouts, and which of them each step used: [{escape(facts.dataset_repo)}]({where}).")
    return _page(head, [*lines, *_sections(facts)])


def dataset_card(facts: CardFacts) -> str:
    """Return README.md of the data set."""
    from huggingface_hub import DatasetCardData

    name = facts.dataset_repo.rpartition("/")[2]
    configs = [
        {
            "config_name": table,
            "default": index == 0,
            "data_files": [{"split": "train", "path": config.pattern}],
            "columns": [feature["name"] for feature in config.features],
        }
        for index, (table, config) in enumerate(facts.configs.items())
    ]
    infos = [{"config_name": table, "features": [*config.features]} for table, config in facts.configs.items()]
    head = DatasetCardData(
        license=facts.license,
        pretty_name=name,
        tags=["ludic", "reinforcement-learning", "rollouts"],
        configs=configs,
        dataset_info=infos,
    )
    of_model = f" of [{escape(facts.repo)}](https://huggingface.co/{facts.repo})" if facts.has_model else ""
    tables = ", ".join(f"`{table}`" for table in facts.configs)
    lines = [
        f"# {escape(name)}",
        f"What was sampled, judged and trained on{of_model}, as ludic stored it: {tables}. `answers` "
        "has a row for each rollout with prompt, answer and reward, and the newest step that considered it, with its "
        "advantage or the filter that dropped it. `batches` is the complete ledger of all steps; join by `rollout_id`. "
        "`datasets` knows no maps, so columns such as reward_components are in the files alone, for Polars, DuckDB and "
        "ludic.",
        "```python\n"
        "import datasets\n\n"
        f'answers = datasets.load_dataset({json.dumps(facts.dataset_repo)}, "answers", split="train")\n'
        "```",
        "The data set is also a run of ludic, without weights, users' code, and what names processes:",
        f"```bash\nhf download {facts.dataset_repo} --repo-type dataset --local-dir run\n"
        "ludic view run        # or: ludic view run --text; ludic sql run; ludic report run\n```",
    ]
    return _page(head, [*lines, *_sections(facts)])


def _page(head: Any, parts: Sequence[str]) -> str:
    return "\n\n".join([f"---\n{head.to_yaml().rstrip()}\n---", *parts]) + "\n"


def _sections(facts: CardFacts) -> Iterator[str]:
    yield f"License: {escape(facts.license) if facts.license else 'not stated'}."
    if facts.picture is not None:
        yield f"![{PICTURE_TITLE}]({facts.picture})"
    if facts.measures:
        yield "## Evaluations"
        yield (
            f"Means over examples, with {facts.confidence:.0%} intervals. Rows of one environment differ in the "
            "settings that they were sampled with, or in the version of the weights."
        )
        columns = ("version", "environment", "evaluation", "measure", "estimate", "interval", "examples")
        yield _table(columns, [_measured(row) for row in facts.measures])
    yield "## Settings"
    yield _table(
        ("setting", "value"), [(name, facts.settings[name]) for name in _FIRST if facts.settings.get(name) is not None]
    )
    others = [(name, value) for name, value in facts.settings.items() if name not in _FIRST and value is not None]
    yield f"<details><summary>All others</summary>\n\n{_table(('setting', 'value'), others)}\n\n</details>"
    yield "## Provenance"
    yield _table(("fact", "value"), [*facts.provenance.items()])
    if facts.code:
        yield _table(("code", "name", "SHA-256"), [(row["role"], row["name"], row["sha256"]) for row in facts.code])


def _measured(row: Mapping[str, Any]) -> Sequence[Any]:
    estimate = "unknown" if row["estimate"] is None else number(row["estimate"], 4)
    keys = (str(row["policy_version"]), row["env_name"], row["evaluation"], measure_title(row))
    return (*keys, estimate, interval_text(row), str(row["num_examples"]))


def _table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [titles, ["---"] * len(titles), *([escape(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _results(facts: CardFacts) -> "Iterator[EvalResult]":
    """Yield the measures of the model's version for the model-index."""
    from huggingface_hub import EvalResult

    for row in facts.measures:
        if row["policy_version"] == facts.provenance["version"] and _is_finite(row["estimate"]):
            bounds = {name: row[name] for name in ("low", "high") if _is_finite(row[name])}
            yield EvalResult(
                task_type="text-generation",
                dataset_type=printable(row["env_name"]),
                dataset_name=printable(row["env_name"]),
                metric_type=row["measure"],
                metric_name=printable(measure_title(row)),
                metric_value=row["estimate"],
                metric_args={
                    "confidence": facts.confidence,
                    **bounds,
                    "num_examples": row["num_examples"],
                    "evaluation": row["evaluation"],
                },
            )


def _is_finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)
