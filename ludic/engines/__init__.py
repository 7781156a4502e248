"""Inference engines behind one protocol: token ids in, token ids with logprobs out."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
