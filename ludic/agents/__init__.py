"""From a request to the rollouts of one episode: agents, transcripts, parsers, contexts, tools."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
