"""Load weights into one vLLM server, so that workers who share it do not undo each other's loads.

A load is claimed by the server's label (ludic.engines.weight_labels). vLLM has no compare-and-set, so a worker writes
its claim, waits for longer than an answer takes, and goes on only if the label is still its own: of workers that claim
at the same time, the last one to write loads. The label is read once more before it says that the new weights are in
use; a worker whose claim is gone by then has been replaced, and changes nothing more.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from ludic.engines.server_http import BadAnswerError, Server
from ludic.engines.weight_labels import HALF_LOADED, Weights, claim, is_claim, weights_of
from ludic.errors import LudicError, ModelError

_CLAIM_S = 0.1
_LOOK_EVERY_S = 0.1
_STALE_S = 10.0
"""Seconds in which a claim changes if its worker lives. While vLLM reads weights it answers nothing, so those seconds
do not count."""


class LoadFailedError(ModelError):
    """A server could not load a folder; its weights are unknown."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The weights that a worker wants on its servers."""

    weights: Weights
    folder: str

    def is_met_by(self, label: str) -> bool:
        """Return whether a server with this label holds these weights, or newer ones of the same run."""
        found = weights_of(label)
        return found is not None and found.run == self.weights.run and found.version >= self.weights.version


async def load(server: Server, wanted: Wanted, *, is_forced: bool = False) -> None:
    """Return once the server holds the wanted weights, or newer ones of the same run.

    is_forced: load in any case. Raises ModelError if the folder is gone, EngineError if the server could not load it.
    """
    while True:
        label, is_abandoned = await _settled(server)
        if wanted.is_met_by(label) and not is_abandoned and not is_forced:
            return
        if not Path(wanted.folder).is_dir():
            raise ModelError(f"{wanted.folder}: there is no such folder; {server.name} waits for a newer version")
        own = claim(label, wanted.weights.version, uuid4().hex[:12])
        await server.set_label(own)
        await asyncio.sleep(_CLAIM_S)
        if await server.label() == own and await _replace(server, wanted, own):
            return


async def _settled(server: Server) -> tuple[str, bool]:
    """Wait while another worker loads; returns the label, and whether its worker has left a load unfinished."""
    label, since = await server.label(), time.monotonic()
    while is_claim(label) and time.monotonic() - since < _STALE_S:
        asked = time.monotonic()
        await asyncio.sleep(_LOOK_EVERY_S)
        before, label = label, await server.label()
        waited_s = time.monotonic() - asked
        if label != before:
            since = time.monotonic()
        elif waited_s > 1:  # it was reading weights
            since += waited_s
    return label, is_claim(label)


async def _replace(server: Server, wanted: Wanted, own: str) -> bool:
    """Load the weights and name them; returns False if another worker claimed the load in the meantime."""
    await server.pause()
    try:
        await server.reload(wanted.folder)
    except BadAnswerError as error:
        with contextlib.suppress(LudicError):
            await server.set_label(HALF_LOADED)
            await server.resume()
        raise LoadFailedError(
            f"{server.name} could not load {wanted.folder}, so it gets no requests ({error}); it must see this folder, "
            "as on a shared disk; else run `ludic serve ROOT` on its machine"
        ) from error
    if await server.label() != own:
        return False
    await server.set_label(wanted.weights.label)
    await server.resume()
    return True
