"""Files on any fsspec filesystem: local folders, S3, faults and retries. The only code that opens files."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
