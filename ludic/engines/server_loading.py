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

from ludic.engines.server_checks import WrongWeightsError, make_load_check
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

    is_forced: load in any case. Raises ModelError if the folder is gone or the server could not load it.
    """
    while True:
        label, is_abandoned = await _settled(server)
        if wanted.is_met_by(label) and not is_abandoned and not is_forced:
            return
        if not Path(wanted.folder).is_dir():
            raise ModelError(f"{wanted.folder}: there is no such folder; {server.name} waits for a newer version")
        device, dtype = await server.device_and_dtype()  # before the claim: the first answer may take seconds
        own = claim(label, wanted.weights.version, uuid4().hex[:12])
        await server.set_label(own)
        await asyncio.sleep(_CLAIM_S)
        if await server.label() != own:
            continue
        loading = _Loading(server, wanted, own, HALF_LOADED if is_abandoned else label)
        if await loading.run(device, dtype):
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


@dataclass(slots=True)
class _Loading:
    """A load that this worker has claimed."""

    server: Server
    wanted: Wanted
    claim: str
    left: str
    """Label of what the server holds if the load fails now."""

    async def run(self, device: str, dtype: str) -> bool:
        """Load the weights and name them; returns False if another worker claimed the load in the meantime.

        Whatever fails, no claim is left that others would wait for, nor a label of weights that were not compared.
        """
        try:
            return await self._replace(device, dtype)
        except Exception as error:
            is_taken_over = await self._give_up()
            if is_taken_over and isinstance(error, WrongWeightsError):
                return False  # the weights that were compared are the other worker's
            if isinstance(error, BadAnswerError):
                raise LoadFailedError(_failed(self.server, self.wanted, error)) from error
            raise

    async def _replace(self, device: str, dtype: str) -> bool:
        server, weights, folder = self.server, self.wanted.weights, self.wanted.folder
        before = weights_of(self.left)
        is_first = before is None or before.run != weights.run
        check = await make_load_check(folder, device, dtype, is_first=is_first)
        await server.pause()
        self.left = HALF_LOADED
        await server.reload(folder)
        check.check_extension(server)
        if await server.label() != self.claim:
            return False
        await server.set_label(weights.label)
        await server.resume()
        await check.compare(server)
        return True

    async def _give_up(self) -> bool:
        """Take the claim, or the label of the weights, from the server; returns True if another worker has done so."""
        with contextlib.suppress(LudicError):
            if await self.server.label() not in (self.claim, self.wanted.weights.label):
                return True
            await self.server.set_label(self.left)
            await self.server.resume()
        return False


def _failed(server: Server, wanted: Wanted, error: BadAnswerError) -> str:
    if isinstance(error, WrongWeightsError):
        return f"{server.name} gets no requests after loading {wanted.folder}: {error}"
    return (
        f"{server.name} could not load {wanted.folder}, so it gets no requests ({error}); it must see this folder, "
        "as on a shared disk; else run `ludic serve ROOT` on its machine"
    )
