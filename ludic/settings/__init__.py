"""What a person may set: annotated fields, flags, files, and the parts and users' code that settings name."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
