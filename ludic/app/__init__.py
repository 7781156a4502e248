"""What people use: every operation as one function, the command line, processes of a run, panel, viewer, report."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
