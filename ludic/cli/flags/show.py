"""Flags of `ludic show`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ludic.cli.settings import RootUrl
from ludic.settings import Shown


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    id: Annotated[str, Shown("ID", by_position=True)]
    """rollout_id or group_id; its beginning or end is enough if no other id matches."""
    color: Literal["logprob", "advantage", "none"] = "logprob"
    """Colour the response's tokens by their probability (logprob) or by the advantage used in training."""
    tokens: bool = False
    """List the tokens, one per line, with ids, logprobs and rewards."""
    full: bool = False
    """Show long texts and responses whole; by default their middle is left out."""
    json: bool = False
    """Print JSON: the rows, their uses in training, and the code that scored them."""
