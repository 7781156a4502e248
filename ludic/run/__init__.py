"""A run on a root: its settings, run.json, the users' code that it names, diagnostics, recorded trainers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
