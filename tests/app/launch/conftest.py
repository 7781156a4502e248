"""A run that has started."""

from app.cli.conftest import ludic, model_folder, started

__all__ = ["ludic", "model_folder", "started"]
