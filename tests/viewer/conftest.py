"""A run that has started."""

from cli.conftest import model_folder, started

__all__ = ["model_folder", "started"]
