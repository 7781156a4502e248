"""Rows in Parquet: rollouts and all other tables, written, read by cursors, named in ledgers, marked as deleted."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
