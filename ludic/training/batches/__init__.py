"""Batches for the trainer: plans from live, stored or replayed rollouts, read and packed for each rank."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
