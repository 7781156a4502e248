"""Load and save models: weights, LoRA adapters, tokenizer and chat template, reward models, tiny models."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
