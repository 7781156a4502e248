"""`ludic view ROOT [ID]`: look at a run in the terminal, or with --web in a browser."""

import ludic
from ludic.cli.flags.view import Settings


def main(settings: Settings) -> None:
    ludic.open(settings.root).view(
        settings.id,
        author=settings.author,
        picture=settings.picture,
        web=settings.web,
        host=settings.host,
        host_names=settings.host_names,
        port=settings.port,
    )
