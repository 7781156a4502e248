"""Weights in a root: published versions, the run's first model, folders of weights and their digests."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
