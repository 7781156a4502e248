"""Training: batches from stored rollouts, the gradient step, checkpoints, publishing, the trainer's loop."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
