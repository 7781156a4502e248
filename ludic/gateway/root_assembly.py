"""Assemble the stored calls of a root into its rollouts, or into those of another root, and store posted scores.

Reads episodes/, calls/ and prompts/; writes rollouts/ and evals/ as assembly-{digest of the group}-0.parquet, one file
a group. Name and content follow from the calls, so a second run finishes an interrupted one and adds nothing else. An
open episode of a gateway that has ended is taken over and sealed first. Raises ConfigError, StoreError, SchemaError.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc

from ludic.base import Track, untracked
from ludic.errors import ConfigError, NameTakenError
from ludic.gateway.assembly import POSTED, Assembly, MakeTokens, SealedEpisode, assemble_episodes
from ludic.gateway.calls import refused
from ludic.gateway.episodes import OWN_COLUMNS, EpisodeFacts, EpisodeResult
from ludic.records import RolloutBatch, RolloutGroup, RolloutMetadata, find_problems
from ludic.root import (
    GATEWAYS,
    EpisodeClaim,
    Life,
    LivesWatch,
    Root,
    change_episode,
    episode_claims,
    held_life,
    newest_episode_claim,
    seal_episode,
    take_over,
)
from ludic.root.rows import Folder, RolloutWriter, ScoreLog, read_all_calls, read_prompt
from ludic.root.sql import connect, run_query

ASSEMBLED_BY = "assembly-"
"""Start of the worker_id of rows that were assembled from stored calls."""
POSTED_VERSION = hashlib.sha256(POSTED.encode()).hexdigest()[:16]
"""Version of the scorer of posted scores; one for all, so that groups are not mixed: the first score counts."""
ASSEMBLER = "ludic assemble"
"""Address of the life that seals episodes, for it is no worker's."""
_EPISODES_A_PLAN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblyReport:
    """What `ludic assemble` made of a root's calls."""

    num_episodes: int = 0
    """Episodes that were assembled now."""
    num_groups: int = 0
    num_rollouts: int = 0
    num_known: int = 0
    """Episodes that have rows already."""
    num_tokens: Mapping[str, int]
    """Sampled tokens of the episodes that were assembled now, by fate: `trained`, or the reason why they are not."""
    num_scores: int = 0
    """Rows whose scores came after them, and are stored in scores/ now."""
    left: Mapping[str, str]
    """Why an episode was left out, by its name."""


def assemble_root(
    root: Root, into: Root | None = None, *, make_tokens: MakeTokens | None = None, track: Track = untracked
) -> AssemblyReport:
    """Assemble all episodes that are over and have no rows yet.

    into: a root for the rows of all episodes; None is `root`. There, the episodes of a run's workers are left out: the
    workers make their rows themselves, and sample again what they lost. make_tokens: None leaves calls of capture
    `text` out of the rows.
    """
    target = into or root
    newest = {claim.episode_id: claim for claim in episode_claims(root)}  # sorted by attempt
    left: dict[str, str] = {}
    sealed = {claim.episode_id: claim for claim in _over(root, list(newest.values()), left, is_own=into is None)}
    known = _episodes_with_rows(target, list(sealed))
    fresh = [claim for claim in sealed.values() if claim.episode_id not in known and _has_sound_facts(claim, left)]
    groups = list(_whole_groups(fresh, [*newest.values()], left))
    counts: Counter[str] = Counter()
    num_rollouts = num_groups = num_episodes = 0
    parts = list(_parts(groups))
    calls = read_all_calls(root) if parts else pa.table({})
    for part in track(parts, len(parts), "parts of the calls"):
        assembled = _assemble(root, calls, [claim for group in part for claim in group], make_tokens)
        for group in part:
            rollouts = _write(target, group, assembled, left)
            if rollouts:
                counts.update(_tokens_by_fate(assembled[claim.episode_id] for claim in group))
                num_groups, num_rollouts, num_episodes = (
                    num_groups + 1,
                    num_rollouts + rollouts,
                    num_episodes + len(group),
                )
    return AssemblyReport(
        num_episodes=num_episodes,
        num_groups=num_groups,
        num_rollouts=num_rollouts,
        num_known=len(known),
        num_tokens=dict(counts.most_common()),
        num_scores=post_scores(target, [claim for claim in sealed.values() if claim.episode_id in known]),
        left=left,
    )


def sealed_episode(claim: EpisodeClaim) -> SealedEpisode:
    """Return what the rows of an episode hold of its claim."""
    return SealedEpisode(
        episode_id=claim.episode_id,
        attempt=claim.attempt,
        seed=claim.seed,
        facts=EpisodeFacts(
            env_name=claim.env_name,
            env_example_id=claim.env_example_id,
            group_id=claim.group_id,
            group_index=claim.group_index,
            group_size=claim.group_size,
            request_index=claim.request_index,
            purpose=claim.purpose,
        ),
        result=EpisodeResult(
            outcome=claim.end or "complete",
            error=claim.error,
            reward=claim.reward,
            reward_components=claim.reward_components,
            correct=claim.correct,
            scored_call_id=claim.scored_call_id,
        ),
        columns=claim.facts,
        left_behind=claim.left_behind,
    )


# --- Episodes ------------------------------------------------------------------------------------------------


def _over(root: Root, claims: Sequence[EpisodeClaim], left: dict[str, str], *, is_own: bool) -> Iterator[EpisodeClaim]:
    """Yield the episodes that are over; note the others in `left`. is_own: their rows go into this root."""
    watch = LivesWatch(root)
    lives = {life: GATEWAYS.read(root, life) for life in sorted({claim.life for claim in claims})}
    over = {life: record is None or watch.is_over(life) for life, record in lives.items()}
    to_seal: list[EpisodeClaim] = []
    for claim in claims:
        record = lives[claim.life]
        if is_own and record is not None and not record.address:
            left[claim.episode_id] = "is an episode of a worker, which makes its rows"
        elif claim.sealed_at is not None:
            yield claim
        elif not over[claim.life]:
            left[claim.episode_id] = (
                "is open at a gateway that lives, or did within its lease; seal it, or stop the gateway"
            )
        elif not is_own:
            yield claim
        else:
            to_seal.append(claim)
    if to_seal:
        with held_life(root, ASSEMBLER) as life:
            for claim in to_seal:
                mine = take_over(life, claim)
                if mine is None:
                    left[claim.episode_id] = "was taken over by another gateway"
                else:
                    yield seal_episode(life, mine, end="complete")


def _has_sound_facts(claim: EpisodeClaim, left: dict[str, str]) -> bool:
    """Return whether a claim names only columns that it may set; note it in `left` if not."""
    others = sorted(claim.facts.keys() - OWN_COLUMNS.keys())
    if others:
        left[claim.episode_id] = (
            f"its claim sets {', '.join(others)[:200]}; it may set {', '.join(sorted(OWN_COLUMNS))}"
        )
    return not others


def _whole_groups(
    fresh: Sequence[EpisodeClaim], claims: Sequence[EpisodeClaim], left: dict[str, str]
) -> Iterator[list[EpisodeClaim]]:
    """Yield the episodes of each group of which no episode is missing or open."""
    groups: defaultdict[str, list[EpisodeClaim]] = defaultdict(list)
    for claim in fresh:
        groups[claim.group_id].append(claim)
    num_begun = Counter(claim.group_id for claim in claims)
    for group_id, group in groups.items():
        if len(group) < num_begun[group_id]:
            reason = f"waits for {num_begun[group_id] - len(group)} other episodes of its group"
            left.update({claim.episode_id: reason for claim in group})
        else:
            yield sorted(group, key=lambda claim: (claim.group_index, claim.episode_id))


def _episodes_with_rows(root: Root, episode_ids: Sequence[str]) -> set[str]:
    """Return the episodes that have rows in a root."""
    if not episode_ids:
        return set()
    with connect(root) as con:
        found = run_query(con, _WITH_ROWS, {"episode_ids": list(episode_ids)})
    return set(found["episode_id"].to_pylist())


_WITH_ROWS = """
select distinct episode_id from rollouts where list_contains($episode_ids, episode_id)
union
select distinct episode_id from evals where list_contains($episode_ids, episode_id)
"""


# --- Rows ------------------------------------------------------------------------------------------------------


def _parts(groups: Sequence[Sequence[EpisodeClaim]]) -> Iterator[list[Sequence[EpisodeClaim]]]:
    part: list[Sequence[EpisodeClaim]] = []
    for group in groups:
        part.append(group)
        if sum(map(len, part)) >= _EPISODES_A_PLAN:
            yield part
            part = []
    if part:
        yield part


def _assemble(
    root: Root, calls: pa.Table, claims: Sequence[EpisodeClaim], make_tokens: MakeTokens | None
) -> dict[str, Assembly]:
    """Return the rows of episodes, by episode. calls: of these and other episodes."""
    wanted = pa.array([claim.episode_id for claim in claims])
    calls = calls.filter(pc.is_in(calls["episode_id"], wanted))
    digests = {
        digest for name in ("system_digest", "tools_digest") for digest in calls[name].unique().drop_null().to_pylist()
    }
    prompts = {digest: read_prompt(root, digest) for digest in sorted(digests)}
    episodes = [sealed_episode(claim) for claim in claims]
    found = assemble_episodes(calls, episodes, prompts, make_tokens)
    return {episode.episode_id: assembly for episode, assembly in zip(episodes, found, strict=True)}


def _write(root: Root, group: Sequence[EpisodeClaim], assembled: Mapping[str, Assembly], left: dict[str, str]) -> int:
    """Write the rows of a group, in a file that follows from its calls alone; return their number."""
    with_rows = [claim for claim in group if assembled[claim.episode_id].rollouts]
    left.update(
        {claim.episode_id: _without_rows(assembled[claim.episode_id]) for claim in group if claim not in with_rows}
    )
    rollouts = [
        replace(row, group_index=index, group_size=len(with_rows))
        for index, claim in enumerate(with_rows)
        for row in assembled[claim.episode_id].rollouts
    ]
    if not rollouts:
        return 0
    first = rollouts[0]
    worker_id = f"{ASSEMBLED_BY}{hashlib.sha256(first.group_id.encode()).hexdigest()[:16]}"
    times = [datetime.fromisoformat(claim.sealed_at or claim.opened_at) for claim in with_rows]
    made = RolloutGroup(key=f"{first.env_name}/{first.env_example_id}", rollouts=tuple(rollouts))
    metadata = RolloutMetadata(worker_id=worker_id, timestamp=max(times))
    batch = RolloutBatch(groups=(made,), metadata=metadata)
    problems = find_problems(batch, root.extra_columns)
    if problems:
        reason = "; ".join(f"{problem.column} {problem.reason}" for problem in problems[:3])
        left.update({claim.episode_id: f"its group can't be stored: {reason}" for claim in group})
        return 0
    folder: Folder = "evals" if first.purpose == "eval" else "rollouts"
    try:
        with RolloutWriter(root, worker_id, folder=folder, file_per_batch=True) as writer:
            writer.append(batch)
    except NameTakenError as error:
        raise ConfigError(
            f"{root.url}: rows of group {first.group_id} were written by another version of ludic, or of its calls; "
            "assemble into another root (--into)"
        ) from error
    return len(rollouts)


def _without_rows(assembly: Assembly) -> str:
    reasons = Counter(row.reason for row in assembly.audit)
    why = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common()) or "no call"
    return f"has no call whose prompt is known: {why}"


def _tokens_by_fate(assemblies: Iterable[Assembly]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for assembly in assemblies:
        for row in assembly.audit:
            counts[row.reason or row.fate] += row.num_tokens
    return counts


# --- Posted scores ---------------------------------------------------------------------------------------------


def post_score(life: Life, episode_id: str, attempt: int, result: EpisodeResult) -> int:
    """Store the score of a sealed episode, and return the number of its rows that have it now.

    Rows that are assembled later have it as their reward. Raises RefusedCallError: not_found; invalid for an open
    episode; sealed for one that has a score since it was sealed; elsewhere if another gateway has it, and lives.
    """
    claim = newest_episode_claim(life.root, episode_id, attempt)
    if claim is None:
        raise refused("not_found", f"there is no attempt {attempt} at episode {episode_id[:200]!r}")
    if claim.sealed_at is None:
        raise refused("invalid", "the episode is open; post its score with its key, or seal it first")
    if claim.scored_at is not None and claim.scored_at > claim.sealed_at:
        raise refused("sealed", f"the episode has a score since it was sealed, {claim.reward}; the first one counts")
    if claim.life != life.number:
        if not LivesWatch(life.root).is_over(claim.life):
            raise refused("elsewhere", "another gateway has the episode; post its score there")
        taken = take_over(life, claim)
        if taken is None:
            raise refused("elsewhere", "another gateway took the episode over; try again")
        claim = taken
    claim = change_episode(
        life,
        claim,
        reward=result.reward,
        reward_components=dict(result.reward_components),
        correct=result.correct,
        scored_call_id=result.scored_call_id or claim.scored_call_id,
        scored_at=datetime.now(UTC).isoformat(timespec="microseconds"),
    )
    return post_scores(life.root, [claim])


_UNSCORED = """
with rows_of as (
    select rollout_id, episode_id, error, episode_reward from rollouts
    union all
    select rollout_id, episode_id, error, episode_reward from evals
)

select rollout_id, episode_id
from rows_of
inner join posted using (episode_id)
anti join (select rollout_id from all_scores where scorer = $scorer) as scored using (rollout_id)
where error is null and episode_reward is distinct from posted.reward
order by rollout_id
"""


def post_scores(root: Root, claims: Sequence[EpisodeClaim]) -> int:
    """Store the rewards of claims that came after the rows of their episodes, as scores of the scorer `posted`.

    Rows that have a posted score already, or that hold this reward, get none. Returns the number of rows that got one.
    """
    rewards = {claim.episode_id: claim for claim in claims if claim.reward is not None}
    if not rewards:
        return 0
    posted = {"episode_id": list(rewards), "reward": [claim.reward for claim in rewards.values()]}
    with connect(root) as con:
        con.register("posted", pa.table(posted))
        rows = run_query(con, _UNSCORED, {"scorer": POSTED}).to_pylist()
    with ScoreLog(root, POSTED) as log:
        for row in rows:
            claim = rewards[row["episode_id"]]
            for name, value in {**claim.reward_components, "score": claim.reward}.items():
                log.append(
                    {
                        "rollout_id": row["rollout_id"],
                        "name": name,
                        "value": value,
                        "scorer_version": POSTED_VERSION,
                        "created_at": datetime.fromisoformat(claim.scored_at) if claim.scored_at else datetime.now(UTC),
                    }
                )
    return len(rows)
