"""Flags of `ludic view`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ludic.cli.settings import RootUrl
from ludic.settings import Port, Shown


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    id: Annotated[str | None, Shown("[ID]", by_position=True)] = None
    """rollout_id to begin with; its beginning or end is enough if no other id matches."""
    author: str | None = None
    """Author of the labels that you give; None is the name of this machine's user."""
    picture: Path | None = None
    """SVG file to write a picture of the first screen to, instead of opening the viewer."""
    web: bool = False
    """Serve the viewer to browsers on this machine instead, until Ctrl-C."""
    host: str = "127.0.0.1"
    """Address to serve at; any but this machine's own lets others read the run and write labels."""
    host_names: tuple[str, ...] = ()
    """More names by which browsers call this machine, such as a proxy's. Its own names and addresses need no flag;
    requests for other names are refused."""
    port: Port = 8000
    """Port to serve at."""
