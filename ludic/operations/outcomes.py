"""Results of operations that have no home below: what was planned, checked, sampled and trained."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludic.results import Frame, Part, Result
from ludic.show.evaluations import Evaluation


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
    """What a run needs, and settings that fit."""

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
    publish: Mapping[str, float]
    """Seconds of a publish, by part."""
    checkpoint: Mapping[str, float]
    """Seconds of a checkpoint, by part."""
    notes: Sequence[str]
    problems: Sequence[str]
    """A sentence for each thing that does not fit."""
    settings_that_fit: Mapping[str, Any] | None
    """Changes of settings by which it fits; empty if it fits as it is, None if none was found."""
    flags: str = ""
    """The same, as flags."""

    def parts(self) -> Iterator[Part]:
        """Tables of memory, disk and seconds, and sentences."""
        trained = "" if self.num_trained == self.num_weights else f", of which {self.num_trained:,} are trained"
        yield f"{self.model}: {self.num_weights:,} weights{trained}"
        yield Frame("memory", self.memory, ("process", "place", "part", "needed_bytes", "limit_bytes"), most=100)
        disk = [{"disk": name, "size_bytes": value} for name, value in self.disk.items()]
        yield Frame("disk", [*disk, {"disk": "all", "size_bytes": sum(self.disk.values())}], ("disk", "size_bytes"))
        for what, parts in (("publish", self.publish), ("checkpoint", self.checkpoint)):
            seconds = [{what: name, "seconds": value} for name, value in parts.items()]
            yield Frame(what, seconds, (what, "seconds"))
        yield from self.notes
        for problem in self.problems:
            yield f"does not fit: {problem}"
        if not self.problems:
            is_compared = any(row["limit_bytes"] is not None for row in self.memory)
            yield "all of it fits" if is_compared else "nothing was given to compare with, such as --host-memory-gb"
        elif self.settings_that_fit:
            yield f"these settings fit: {self.flags}"
        else:
            yield "no change of settings that was tried is enough; use more or larger GPUs, or a smaller model"


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

    system: str
    files: Mapping[str, str]
    """Their texts, by name."""
    out: str | None
    """Folder that they were written to; None if they were not."""

    def parts(self) -> Iterator[Part]:
        """The texts, or the commands that start the files that were written."""
        if self.out is None:
            yield from "\n".join(self.files.values()).splitlines()
        else:
            yield from (_NEXT[self.system].format(Path(self.out) / name) for name in self.files)


_NEXT = {"slurm": "sbatch {}", "kubernetes": "kubectl apply -f {}", "skypilot": "sky jobs launch {}"}
"""Command that starts a file, by system."""
