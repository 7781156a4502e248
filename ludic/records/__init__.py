"""Records of rollouts, and the schemas, checks and Arrow conversion of the tables. No storage, no settings."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
