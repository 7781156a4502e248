"""The root of a run: catalogue, files, claims, writer, reader, ledger, weights, SQL, maintenance. Needs no torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
