"""What every room stands on: paths, processes, devices, texts, tables of results; nothing of training or storage."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
