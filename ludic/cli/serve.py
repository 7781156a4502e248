"""`ludic serve ROOT`: run a vLLM server on this machine that follows the run's policies."""

from ludic.cli.flags.serve import Settings
from ludic.launch.process import stop_on_signals
from ludic.launch.serve import serve
from ludic.store import Root


def main(settings: Settings) -> None:
    serve(Root.open(settings.root), settings.serve, stop_on_signals())
