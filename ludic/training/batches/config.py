"""Define the settings of batches; imports no torch and nothing else of training."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypedDict

from ludic.errors import ConfigError
from ludic.settings import CountOr0, Index, PositiveCount, Role, Seconds, Tokens, names_of
from ludic.settings.table import check

MICRO_BATCH_TOKENS = 16384
"""Tokens of a micro-batch on the CPU, and for users' training loops."""


class OfLoss(TypedDict):
    """Facts about the loss that the plan of a batch needs; see ludic.root.sql.planner.BatchRules."""

    loss_unit: Literal["row", "pair", "episode"]
    needs_logprobs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Rollouts of a gradient step, and their advantages. None disables a setting, unless its text says otherwise."""

    advantage: Annotated[str, Role(on_card=True, changes_weights=False, of_algorithm=True)] = "rloo"
    """Advantage estimator: a name in ludic/root/sql/advantages, path/to/file.sql, or path/to/file.py:function."""
    filters: Annotated[tuple[str, ...], Role(changes_weights=False, of_algorithm=True)] = ()
    """Filters: names in ludic/root/sql/filters, or paths of .sql files with a predicate; rows for which it is true are
    dropped."""
    where: Annotated[str | None, Role(changes_weights=False)] = None
    """Train only on rollouts for which this SQL predicate is true; None trains on all. Advantages still use the whole
    group, unless baseline_over is kept."""
    selection: Annotated[str | None, Role(changes_weights=False, of_algorithm=True)] = None
    """Order in which groups are put into batches: a name in ludic/root/sql/selections, or path/to/file.sql. None uses
    fifo online and epochs offline."""
    sql_params: Annotated[Mapping[str, float | int | str], Role(changes_weights=False, of_algorithm=True)] = field(
        default_factory=dict
    )
    """Values of the $parameters of advantage, filters and selection; docs/algorithms.md lists them."""
    max_uses: Annotated[PositiveCount, Role(changes_weights=False, of_algorithm=True)] = 1
    """Maximum number of steps that train on one group, online."""
    max_off_policy_steps: Annotated[CountOr0 | None, Role(changes_weights=False)] = 32
    """Drop rollouts sampled more than this many policy versions before the trainer's version; None keeps all. It also
    bounds how far ahead workers sample. Not used offline."""
    max_age_s: Annotated[Seconds | None, Role(changes_weights=False)] = None
    """Drop rollouts written more than this many seconds ago; None keeps all. Not used offline."""
    baseline_over: Annotated[Literal["group", "kept"], Role(changes_weights=False, of_algorithm=True)] = "group"
    """Rollouts that the baseline is computed from: the whole group, or only those that the filters keep."""
    scorers: Annotated[tuple[str, ...], Role(changes_weights=False)] = ()
    """Scorers whose scores each rollout needs, SCORER or SCORER@VERSION (docs/scores.md); SQL reads them from the table
    `scores`. Rollouts without are dropped."""
    reward_scorer: Annotated[str | None, Role(changes_weights=False)] = None
    """Scorer whose value replaces the reward of the episode: SCORER or SCORER@VERSION, with :VALUE if it gives several.
    None trains on the environment's reward."""
    mixed_scorers: Annotated[bool, Role(changes_weights=False)] = False
    """Train on groups whose rollouts were scored by different versions of a scorer, instead of dropping them."""
    wait_for_scores_s: Annotated[Seconds | None, Role(changes_weights=False)] = 600.0
    """Seconds that a group waits for scores after it was read; then its rollouts without scores are dropped. None
    waits without a limit. Not used offline."""
    offline: Annotated[bool, Role(changes_weights=False, of_stored=True)] = False
    """Train on the rollouts that are stored now, not on those that workers deliver."""
    sources: Annotated[tuple[str, ...], Role(changes_weights=False, of_stored=True)] = ()
    """Roots whose rollouts to train on offline; if empty, the run's own root."""
    epochs: Annotated[PositiveCount | None, Role(changes_weights=False, of_stored=True)] = None
    """Offline passes over the stored rollouts; num_steps is computed from it. None trains until num_steps."""
    compute_logprobs: Annotated[bool, Role(changes_weights=False, of_stored=True)] = False
    """Offline: compute the logprobs of rollouts whose token ids alone were kept (docs/offline.md), under the weights of
    their own version, where the root has these, and train on them too."""
    replay_batches: Annotated[str | None, Role(changes_weights=False, of_stored=True)] = None
    """Root of another run whose batches to repeat, step by step, with its settings; None is off."""
    replan_from: Annotated[Index | None, Role(changes_weights=False, of_stored=True)] = None
    """Step of replay_batches after which this run begins: it plans the rollouts that each later step considered, by its
    own advantage and filters (`ludic what-if --train`). None repeats the batches as they were."""
    max_seq_len: Tokens | None = None
    """Maximum tokens of a sequence; longer ones lose the end of their response. None does not cut."""
    training_unit: Literal["episode", "turn"] = "episode"
    """Train on each row as one sequence, or on each completion in it as a sequence of its own, whose prompt is all that
    came before. Turns cost more tokens; a setting that looks at sequences, such as max_seq_len, then looks at turns."""
    max_tokens_per_micro_batch: Annotated[Tokens | None, Role(on_cpu=MICRO_BATCH_TOKENS)] = None
    """Maximum tokens in one forward pass of a rank; a longer sequence gets its own pass. None is 16,384 on the CPU, and
    fits the memory of a GPU."""
    replay_experts: bool | None = None
    """Send each token to the experts that the sampler chose (router replay, docs/models.md), where a rollout has
    them. None does so in a run with keep_experts."""
    balance_by: Annotated[Literal["tokens", "cost"] | None, Role(on_cpu="tokens")] = None
    """Quantity that is even over ranks and micro-batches: tokens, or the cost of sequences, in which attention grows
    with the square of the length. None is cost on CUDA, tokens on the CPU."""
    rollout_timeout_s: Annotated[Seconds | None, Role(changes_weights=False)] = 1800.0
    """Seconds without new rollouts that a step can use, since none come or filters drop them, before the trainer stops
    with an error; None waits forever."""

    def __post_init__(self) -> None:
        """Raises ConfigError if a value is out of range or contradicts another setting."""
        check(self)
        if not self.offline and (self.sources or self.epochs):
            name = "sources" if self.sources else "epochs"
            instead = ", or num_steps = rows * epochs / groups_per_batch" if name == "epochs" else ""
            found = f"{name} is {getattr(self, name)}"
            raise ConfigError(f"{found}, which only offline training looks at; set offline{instead}")
        if self.compute_logprobs and not self.offline:
            raise ConfigError(
                "compute_logprobs is set, and only offline training computes logprobs: workers keep those of their own "
                "rollouts; set offline, or leave it out"
            )
        if self.offline and self.replay_batches is not None:
            raise ConfigError(f"replay_batches is {self.replay_batches} and offline is set; choose one of them")
        if self.replan_from is not None and self.replay_batches is None:
            raise ConfigError(f"replan_from is {self.replan_from}, which needs replay_batches, the run to begin from")
        if self.offline and self.max_uses > 1:
            raise ConfigError(f"max_uses is {self.max_uses}, which offline training does not look at; set epochs")
        for name, param in self.sql_params.items():
            if not isinstance(param, float | int | str):
                raise ConfigError(f"sql_params has {name!r} = {param!r}, wanted a number or a text")

    @property
    def is_stored(self) -> bool:
        """Return whether training reads stored batches or rollouts instead of waiting for workers."""
        return self.offline or self.replay_batches is not None


OFFLINE_SETTINGS = names_of(BatchConfig, "of_stored")
"""Settings that select training on stored rollouts."""
