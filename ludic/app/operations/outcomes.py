"""Results of operations that have no home below: what was planned, checked, sampled, trained and imported."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, overload

from ludic.app.show.evaluations import Evaluation
from ludic.base import Frame, Part, Result, plural, size
from ludic.root import OWN_FORM, ImportReport


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Checked(Result):
    """What checks found before a run starts."""

    root: str
    """URL or path of the root."""
    rows: Sequence[Mapping[str, str]]
    """One row for each check, with `check`, `state` (ok, look, wrong or left out) and `found`."""

    def parts(self) -> Iterator[Part]:
        """A line for each check."""
        width = max(len(row["state"]) for row in self.rows)
        for row in self.rows:
            yield f"{row['state']:<{width}}  {row['check']}: {row['found']}"

    @property
    def failure(self) -> str | None:
        num_wrong = sum(row["state"] == "wrong" for row in self.rows)
        return f"{num_wrong} of {len(self.rows)} checks found a mistake" if num_wrong else None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Planned(Result):
    """What a run needs."""

    model: str
    """The model, as it was given."""
    num_weights: int
    """Weights of the model."""
    num_trained: int
    """Weights that are trained."""
    memory: Sequence[Mapping[str, Any]]
    """One row for each kind of process and place, with `process`, `place` (GPU or host), `part`, `needed_bytes`,
    `limit_bytes` and `fits`, and before it one for each part of it."""
    disk: Mapping[str, int]
    """Bytes on the disk, by part."""
    notes: Sequence[str]
    problems: Sequence[str]
    """A sentence for each thing that does not fit."""
    advice: str
    """What to change if memory is short; else empty."""

    def parts(self) -> Iterator[Part]:
        """Tables of memory and disk, and sentences."""
        trained = "" if self.num_trained == self.num_weights else f", of which {self.num_trained:,} are trained"
        yield f"{self.model}: {self.num_weights:,} weights{trained}"
        yield Frame("memory", self.memory, ("process", "place", "part", "needed_bytes", "limit_bytes"), most=100)
        disk = [{"disk": name, "size_bytes": value} for name, value in self.disk.items()]
        yield Frame("disk", [*disk, {"disk": "all", "size_bytes": sum(self.disk.values())}], ("disk", "size_bytes"))
        yield from self.notes
        for problem in self.problems:
            yield f"does not fit: {problem}"
        if not self.problems:
            is_compared = any(row["limit_bytes"] is not None for row in self.memory)
            yield "all of it fits" if is_compared else "nothing was given to compare with, such as --host-memory-gb"
        elif self.advice:
            yield f"{self.advice}; else use more or larger GPUs, or a smaller model"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Trained(Result):
    """How training ended."""

    root: str
    """URL or path of the root."""
    step: int
    """Last step in the weights."""
    num_steps: int | None
    """Step that training should reach; None if the stored rollouts decide."""
    evaluation: Evaluation | None = None
    """Mean rewards of the versions that were evaluated meanwhile."""
    hint: str = ""
    """What to look at next."""
    is_created_only: bool = False
    """Whether the root was made, and nothing started."""
    is_of_other_rank: bool = False
    """Whether another rank of the same training prints it."""

    @property
    def is_out(self) -> bool:
        return self.is_of_other_rank

    def to_dict(self) -> dict[str, Any]:
        figures = {"root": self.root, "step": self.step, "num_steps": self.num_steps}
        return figures if self.evaluation is None else figures | {"evaluation": self.evaluation.to_dict()}

    def parts(self) -> Iterator[Part]:
        """The mean rewards, and a sentence."""
        if self.evaluation is not None:
            yield from self.evaluation.parts()
        if self.is_created_only:
            yield f"{self.root} is ready; `ludic worker {self.root}` samples for it, `ludic train {self.root}` trains"
        elif self.num_steps is not None and self.step > self.num_steps:
            past = f"which is past num_steps {self.num_steps}; nothing to train"
            yield f"{self.root} is at step {self.step} already, {past}{self.hint}"
        else:
            of = f" of {self.num_steps}" if self.num_steps else ""
            yield f"trained to step {self.step}{of} in {self.root}{self.hint}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sampled(Result):
    """What a worker sampled."""

    root: str
    """URL or path of the root."""
    num_groups: int
    """Groups that were committed."""

    def parts(self) -> Iterator[Part]:
        """A sentence."""
        yield f"{self.num_groups} groups committed to {self.root}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ClusterFiles(Result):
    """Files that start a run on a cluster."""

    start: str
    """Command that starts a file, {}."""
    files: Mapping[str, str]
    """Their texts, by name."""
    out: str | None
    """Folder that they were written to; None if they were not."""

    def parts(self) -> Iterator[Part]:
        """The texts, or the commands that start the files that were written."""
        if self.out is None:
            yield from "\n".join(self.files.values()).splitlines()
        else:
            yield from (self.start.format(Path(self.out) / name) for name in self.files)


# --- Imports ---------------------------------------------------------------------------------------------------------


_MOST_REFUSED = 10


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Imported(Result, Sequence[ImportReport]):
    """What was imported from each file; a sequence of their reports."""

    root: str
    """URL or path of the root."""
    files: Sequence[ImportReport]
    folders: Sequence[str] = ()
    """Folders that were followed; `files` are those that this call imported."""
    left: Mapping[str, str] = field(default_factory=dict)
    """Why a file of a followed folder was not imported, by its name."""

    @overload
    def __getitem__(self, index: int) -> ImportReport: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[ImportReport]: ...

    def __getitem__(self, index: int | slice) -> ImportReport | Sequence[ImportReport]:
        return self.files[index]

    def __len__(self) -> int:
        return len(self.files)

    def parts(self) -> Iterator[Part]:
        """A sentence for each file, or one for all of followed folders, whose files were named one by one."""
        if self.folders:
            yield said_of(_sum(self.files, f"{plural(len(self.files), 'file')} of {', '.join(self.folders)}"))
        else:
            yield from map(said_of, self.files)

    @property
    def remarks(self) -> Sequence[str]:
        """What rollouts lack, and the files, fields and records that were not imported."""
        reports = [_sum(self.files, "all files")] if self.folders else self.files
        left = [f"{file}: {reason}" for file, reason in self.left.items()]
        return left + [f"{report.file}: {line}" for report in reports for line in _remarks_of(report)]


def said_of(report: ImportReport) -> str:
    """Return what was imported from a file, in one line."""
    rollouts = f"{plural(report.num_rollouts, 'rollout')} in {plural(report.num_groups, 'group')}"
    form = f", read as {report.form}" if report.form not in ("", OWN_FORM) else ""
    note = "; was there already" if report.was_there else ""
    return f"{report.file}: {rollouts}, of {plural(report.num_records, 'record')}{form}{note}"


def _sum(reports: Sequence[ImportReport], name: str) -> ImportReport:
    """Return one report for files; a reason for which a record was refused names its file."""

    def fields(name: str) -> Mapping[str, int]:
        return sum((Counter(getattr(report, name)) for report in reports), Counter())

    return ImportReport(
        file=name,
        worker_id="",
        num_records=sum(report.num_records for report in reports),
        num_groups=sum(report.num_groups for report in reports),
        num_rollouts=sum(report.num_rollouts for report in reports),
        num_without_logprobs=sum(report.num_without_logprobs for report in reports),
        num_from_text=sum(report.num_from_text for report in reports),
        num_unscored=sum(report.num_unscored for report in reports),
        tokenizer=next((report.tokenizer for report in reports if report.tokenizer), ""),
        kept_as_metadata=fields("kept_as_metadata"),
        not_kept=fields("not_kept"),
        refused=[
            replace(refusal, reason=f"of {report.file}: {refusal.reason}")
            for report in reports
            for refusal in report.refused
        ],
    )


def _remarks_of(report: ImportReport) -> Iterator[str]:
    for title, counts in (("kept as metadata", report.kept_as_metadata), ("not kept", report.not_kept)):
        if counts:
            yield f"{title}: {', '.join(f'{name} ({count:,})' for name, count in counts.items())}"
    yield from (f"refused, line {refusal.line}: {refusal.reason}" for refusal in report.refused[:_MOST_REFUSED])
    if len(report.refused) > _MOST_REFUSED:
        yield f"refused, {len(report.refused) - _MOST_REFUSED:,} more: --json lists all"
    if report.num_unscored:
        yield f"{report.num_unscored:,} rollouts without a reward: stored, never trained on"
    if report.num_without_logprobs:
        num_texts, num_all = report.num_from_text, report.num_without_logprobs
        by = f", by the tokenizer of {report.tokenizer}" if report.tokenizer else ""
        yield (
            f"{num_all:,} rollouts without the sampler's logprobs ({num_texts:,} made from texts{by}): sft, dpo, "
            "ipo and orpo train on them, and nothing that takes a ratio to the sampler"
            + (", unless --compute-logprobs finds the weights that sampled them" if num_all > num_texts else "")
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Assembled(Result):
    """What the stored calls of agents became."""

    root: str
    """URL or path of the root with the rows."""
    num_episodes: int
    """Episodes that were assembled now."""
    num_groups: int
    num_rollouts: int
    num_known: int
    """Episodes that had rows already."""
    num_tokens: Mapping[str, int]
    """Sampled tokens of the episodes that were assembled now, by fate: `trained`, or the reason why they are not."""
    num_scores: int
    """Rows whose posted scores were stored now, after them."""
    left: Mapping[str, str]
    """Why an episode was left out, by its name."""

    def parts(self) -> Iterator[Part]:
        """A sentence, and the tokens by fate."""
        rollouts = f"{plural(self.num_rollouts, 'rollout')} in {plural(self.num_groups, 'group')}"
        shown = f"; `ludic view {shlex.quote(self.root)}` shows them" if self.num_rollouts else ""
        yield f"{self.root}: {plural(self.num_episodes, 'episode')} became {rollouts}{shown}"
        if self.num_known:
            yield f"{plural(self.num_known, 'episode')} had rows already"
        if self.num_scores:
            yield f"stored the posted scores of {plural(self.num_scores, 'rollout')}"
        rows = [{"fate": fate, "num_tokens": num} for fate, num in self.num_tokens.items()]
        if rows:
            yield Frame("sampled tokens", rows, ("fate", "num_tokens"))

    @property
    def remarks(self) -> Sequence[str]:
        """The episodes that were left out, by reason, and what to do about calls without tokens."""
        counts = Counter(self.left.values())
        found = [f"left out, {plural(count, 'episode')}: {reason}" for reason, count in counts.most_common()]
        if "text" in self.num_tokens or any(" text" in reason for reason in counts):
            found.append("calls that were recorded as text have no tokens; --tokenizer NAME makes them")
        return found


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Pushed(Result):
    """What was sent to the Hub, or written to a folder to be sent."""

    root: str
    """URL or path of the root."""
    sent: Sequence[Mapping[str, Any]]
    """One row for each repository, with `kind`, `repo`, `url`, `num_files` and `size_bytes`; url is None if nothing was
    sent."""
    personal: Sequence[Mapping[str, Any]]
    """One row for each name of a host, user or folder that was found, with `found`, `where` and `num_places`."""
    folder: str | None
    """Folder that was written; None if it was sent."""
    version: int | None
    """Version of the weights."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def parts(self) -> Iterator[Part]:
        """A line for each repository, then what names machines and people."""
        for row in self.sent:
            files = f"{plural(row['num_files'], 'file')}, {size(row['size_bytes'])}"
            where = row["url"] or f"{self.folder}/{row['kind']}, for {row['repo']}"
            yield f"{row['kind']}: {files}: {where}"
        if self.folder is not None:
            yield "nothing was sent; without --to the same command sends it"
        if self.personal:
            yield Frame("personal", self.personal, ("found", "where", "num_places"), most=100, has_heading=True)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GatewayEnded(Result):
    """The episode of a gateway's command, if it ran one."""

    root: str
    """URL or path of the root."""
    episode_id: str | None = None
    """None without a command."""
    num_calls: int = 0
    """Stored calls of the episode."""
    exit_code: int | None = None
    """Of the command; 128 + N for signal N."""

    def parts(self) -> Iterator[Part]:
        """A line of the episode, or of all that were served, with what to do next."""
        next_one = f"`ludic assemble {shlex.quote(self.root)}` makes rollouts"
        if self.episode_id is None:
            yield f"the gateway has ended; {next_one} of the calls in {self.root}"
        elif self.num_calls:
            yield f"episode {self.episode_id}: {plural(self.num_calls, 'call')}, stored in {self.root}; {next_one}"
        else:
            yield (
                f"episode {self.episode_id}: no call came from the command, which finds the model by OPENAI_BASE_URL "
                "or ANTHROPIC_BASE_URL; some agents need settings of their own (docs/gateway.md)"
            )

    @property
    def failure(self) -> str | None:
        return f"the command ended with exit code {self.exit_code}" if self.exit_code else None
