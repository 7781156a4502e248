"""Read the bodies of calls in the APIs of OpenAI and Anthropic, and write their responses, streams and errors. Pure."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
