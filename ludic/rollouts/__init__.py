"""The stream of episodes: requests, episodes, complete groups; for workers, evaluations and scores."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
