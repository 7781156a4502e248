"""Answer the model calls of agents, each after it is stored; open, find, take over, replay and seal episodes.

Writes gateways/, episodes/, prompts/ and calls/ (ludic.root.gateways, ludic.root.rows.calls). A call's intent is stored
while it is sampled, and its answer leaves when both are stored. Raises RefusedCallError for what a client did, and for
what it can try again.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ludic.engines import SamplingParams
from ludic.gateway.calls import Answer, Backend, Caller, CallRequest
from ludic.gateway.config import GatewaySettings
from ludic.gateway.episodes import CallCounts, EpisodeFacts, EpisodeResult, OpenEpisode
from ludic.root import Root

if TYPE_CHECKING:
    from ludic.root.gateways import Life


class Gateway:
    """Answers the calls of the episodes that one life of a gateway holds.

    All coroutines run in one event loop. A call goes on if its waiter is cancelled, and is stored.
    """

    def __init__(
        self, root: Root, life: "Life", backend: Backend, settings: GatewaySettings, sampling: SamplingParams
    ) -> None:
        """life: of ludic.root.gateways.held_life. sampling: settings of the run, which clients can only shorten."""
        self.root, self.life, self.backend, self.settings, self.sampling = root, life, backend, settings, sampling

    @property
    def num_in_flight(self) -> int:
        """Calls that are being sampled or stored."""
        raise NotImplementedError

    @property
    def num_open(self) -> int:
        """Open episodes."""
        raise NotImplementedError

    async def start(self) -> None:
        """Take over the open episodes of lives that have ended, and begin to seal episodes that expire.

        Only their claims are read; the calls of an episode are read when its first call comes.
        """

    async def open_episode(
        self,
        *,
        episode_id: str | None = None,
        attempt: int = 1,
        seed: int | None = None,
        facts: EpisodeFacts | None = None,
        timeout_s: float | None = None,
        replay: bool = False,
    ) -> OpenEpisode:
        """Claim an attempt at an episode and return it, with its key.

        episode_id: None makes one. seed: None derives one from the id. timeout_s: seconds until it expires; None is the
        settings'. replay: if the attempt is stored, open and of this gateway or of a life that has ended, take it over,
        with a new key: calls whose requests are equal to stored ones, from the first on, are answered with the stored
        answers, and not sampled. The first other request ends the replay.

        Raises RefusedCallError: invalid for a bad id or attempt, or one that is open already; sealed; elsewhere for one
        that a live gateway holds; full; stopping.
        """
        raise NotImplementedError

    async def find(self, key: str | None, episode_id: str | None = None, attempt: int | None = None) -> OpenEpisode:
        """Return the open episode of a key, or of an id and attempt.

        key: of the episode; None if the caller has proven otherwise that it may use every episode, by the gateway's own
        key. episode_id, attempt: from the URL; None takes the key's. A key of another episode than the URL's is wrong.

        Raises RefusedCallError: wrong_key, not_found, sealed (also if it has expired), elsewhere (with the owner's
        address), stopping.
        """
        raise NotImplementedError

    async def call(self, episode: OpenEpisode, request: CallRequest, caller: Caller) -> Answer:
        """Store the call's intent, sample, store the call, and return its answer.

        A retry gets the answer of the call that it repeats. If the waiter is cancelled, such as by a client that
        disconnects, the call goes on. Raises RefusedCallError; a failed call is stored, too.
        """
        raise NotImplementedError

    def counts(self, episode: OpenEpisode) -> CallCounts:
        """Return the calls and tokens of an episode in this life of the gateway."""
        raise NotImplementedError

    async def score(
        self,
        episode: OpenEpisode,
        *,
        reward: float | None,
        reward_components: Mapping[str, float] | None = None,
        correct: bool | None = None,
        scored_call_id: str | None = None,
    ) -> None:
        """Store the score of an open episode; the newest one counts. Raises RefusedCallError."""
        raise NotImplementedError

    async def seal(self, episode: OpenEpisode, result: EpisodeResult | None = None) -> None:
        """End an episode, after the calls in flight; later calls are refused as sealed.

        result: None is complete, with the score that was posted; so is a reward of None. Sealing a sealed episode again
        does nothing.
        """
        raise NotImplementedError

    async def drain(self) -> None:
        """Refuse new calls as stopping, wait for those in flight, at most drain_timeout_s, and stop all tasks.

        Open episodes stay open, so that the next life takes them over.
        """
        raise NotImplementedError
