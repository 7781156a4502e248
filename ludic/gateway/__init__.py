"""Any agent's model calls over HTTP: each is stored before it is answered, and SQL makes episodes of the calls."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
