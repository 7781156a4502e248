"""The fixtures of the command line's tests: attacks are seen as a user sees them."""

from app.cli.conftest import breakable, first_batch, ludic, make_trained, model_folder, started, trained

__all__ = ["breakable", "first_batch", "ludic", "make_trained", "model_folder", "started", "trained"]
