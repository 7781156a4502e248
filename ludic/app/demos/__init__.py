"""Demos: tiny models that learn on this machine without downloads. They are pipelines on ludic's public API."""

NUM_WORKERS = 2
"""Workers of the demo without tools."""
