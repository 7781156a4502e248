"""Scores that are posted after an episode's rows exist: what a trainer waits for, and how its next plan changes."""

import threading
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from gateway.scripted import says, scripted_agent
from gateway.served import OWN_KEY, served
from gateway.stored_calls import store_group
from tiny_runs import create_root, query, train_config

from ludic.errors import StalledError
from ludic.gateway import EpisodeResult, RefusedCallError, assemble_root, post_score
from ludic.root import Life, Root, claim_life, newest_episode_claim
from ludic.root.attempts import start_attempt
from ludic.root.json_records import encode_record
from ludic.training.batches.online import OnlineSource
from ludic.training.publisher import Publisher

NAMES = ("a", "b", "c"), ("d", "e", "f")


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """A gateway with two groups of episodes that nobody has scored, whose rows exist."""
    life = claim_life(create_root(str(tmp_path / "run"), "tiny"), "http://a")
    for number, names in enumerate(NAMES):
        store_group(life, number, dict.fromkeys(names))
    assert assemble_root(life.root).num_rollouts == 10
    return life


def source_of(root: Root, **settings: object) -> OnlineSource:
    publisher = Publisher(root, start_attempt(root), keep=None)
    source = OnlineSource(root, train_config(**settings).batch, threading.Event())
    source.resume(None, publisher)
    publisher.publish(lambda folder: None, step=0)
    return source


def post(life: Life, **rewards: float) -> None:
    for name, reward in rewards.items():
        post_score(life, name, 1, EpisodeResult(reward=reward, reward_components={"tests": reward / 2}))


@pytest.mark.slow
def test_a_trainer_waits_for_posted_scores_with_a_limit_and_plans_with_them(life: Life):
    post(life, a=1.0, b=0.0, c=0.5)
    waiting = source_of(life.root, reward_scorer="posted", wait_for_scores_s=None, rollout_timeout_s=0.3)
    with pytest.raises(StalledError, match="1 groups wait for scores: posted has not scored 5 rollouts"):
        waiting.plan(1, attempt_id=1, trainer_version=0)
    waiting.close()

    source = source_of(life.root, reward_scorer="posted", wait_for_scores_s=None, rollout_timeout_s=60.0)
    timer = threading.Timer(0.3, post, (life,), {"d": 0.0, "e": 1.0, "f": 1.0})
    timer.start()
    rows = source.plan(1, attempt_id=1, trainer_version=0).rows.to_pylist()
    timer.join()
    source.close()
    episode_of = dict(query(life.root, "select rollout_id, episode_id from rollouts"))
    found = {(episode_of[row["rollout_id"]], row["episode_reward"], row["advantage"]) for row in rows}
    # rloo: a reward minus the mean of the two others; each row of an episode has the episode's
    assert found == {
        *{("a", 1.0, 0.75), ("b", 0.0, -0.75), ("c", 0.5, 0.0)},
        *{("d", 0.0, -1.0), ("e", 1.0, 0.5), ("f", 1.0, 0.5)},
    }
    assert len(rows) == 10


@pytest.mark.slow
def test_after_the_limit_episodes_without_a_posted_score_are_dropped_by_name(life: Life):
    post(life, a=1.0, b=0.0, d=0.0, e=1.0)
    source = source_of(life.root, reward_scorer="posted", wait_for_scores_s=0.2, rollout_timeout_s=60.0)
    rows = source.plan(1, attempt_id=1, trainer_version=0).rows.to_pylist()
    source.close()
    episode_of = dict(query(life.root, "select rollout_id, episode_id from rollouts"))
    assert {(episode_of[row["rollout_id"]], row["reason"]) for row in rows if not row["used"]} == {
        ("c", "unscored"),
        ("f", "unscored"),
    }


@pytest.mark.slow
def test_a_score_is_posted_once_and_found_again_if_it_came_before_the_rows(tmp_path: Path):
    life = claim_life(create_root(str(tmp_path / "run"), "tiny"), "http://a")
    store_group(life, 0, {"a": None, "b": 0.25, "c": None})
    assert post_score(life, "a", 1, EpisodeResult(reward=1.0)) == 0  # no rows yet
    assemble_root(life.root)
    assert query(life.root, "select distinct episode_id, episode_reward from rollouts order by 1") == [
        ("a", 1.0),
        ("b", 0.25),
        ("c", None),
    ]
    assert post_score(life, "b", 1, EpisodeResult(reward=0.75)) == 1
    with pytest.raises(RefusedCallError, match=r"has a score since it was sealed, 0\.75; the first one counts"):
        post_score(life, "b", 1, EpisodeResult(reward=0.5))
    with pytest.raises(RefusedCallError, match="there is no attempt 2 at episode 'c'"):
        post_score(life, "c", 2, EpisodeResult(reward=0.5))
    # As if the process had been killed between the claim and the score.
    claim = newest_episode_claim(life.root, "c", 1)
    life.root.put(
        "episodes/c/1/1.json", encode_record(replace(claim, reward=0.5, scored_at="2026-02-01T00:00:00+00:00"))
    )
    assert assemble_root(life.root).num_scores == 1
    scores = "select episode_id, name, value, scorer from scores join rollouts using (rollout_id) order by all"
    assert query(life.root, scores) == [("b", "score", 0.75, "posted"), ("c", "score", 0.5, "posted")]
    assert assemble_root(life.root).num_scores == 0


@pytest.mark.slow
def test_the_gateways_own_key_posts_the_score_of_a_sealed_episode_and_its_own_key_can_not(tmp_path: Path):
    root = create_root(str(tmp_path / "run"), "tiny")
    with served(root, scripted_agent(lambda asked: says("hello"))) as server:
        episode = server.open_episode()
        body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
        episode.post("/v1/chat/completions", body).raise_for_status()
        episode.post("/seal").raise_for_status()
        assert episode.post("/score", {"reward": 0.5}).status_code == 409
        own = {"Authorization": f"Bearer {OWN_KEY}"}
        score = f"{episode.base_url}/score"
        assert httpx2.post(score, json={"reward": 1e39}, headers=own).status_code == 400
        assert httpx2.post(score, json={"reward": 0.5}, headers=own).status_code == 200
        again = httpx2.post(score, json={"reward": 1.0}, headers=own)
        assert (again.status_code, "the first one counts" in again.text) == (409, True)
        other = httpx2.post(f"{server.url}/e/{episode.episode_id}/2/score", json={"reward": 1.0}, headers=own)
        assert other.status_code == 404  # only a call opens an episode
    assert newest_episode_claim(root, episode.episode_id, 1).reward == 0.5
