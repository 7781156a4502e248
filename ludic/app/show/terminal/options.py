"""Define the options of `ludic view`; imports no textual."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ludic.base import LOCAL_HOST
from ludic.errors import ConfigError
from ludic.settings import Port, Shown
from ludic.settings.table import check

PORT = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewOptions:
    """Options of `ludic view`."""

    rollout_id: Annotated[str | None, Shown("[ID]", by_position=True)] = None
    """Rollout to open first: its id, or the first or last characters of it, which may be in quotes; as text, also a
    group. None opens the versions."""
    author: str | None = None
    """Author of labels given in the viewer; None is the user of this machine."""
    picture: Path | None = None
    """SVG file to write a picture of the first screen to, instead of opening the viewer."""
    web: bool = False
    """Serve pages to browsers, at an address that is printed, instead of opening the viewer in this terminal."""
    host: str = LOCAL_HOST
    """Address to serve at; any but the default is open to other machines, and the connection is not encrypted."""
    host_names: tuple[str, ...] = ()
    """More names by which browsers call this machine, such as a proxy's; requests for other names are refused."""
    port: Port = PORT
    """Port to serve at."""

    def __post_init__(self) -> None:
        check(self)
        if self.web and self.picture is not None:
            raise ConfigError("web and picture contradict each other; give one of them")
