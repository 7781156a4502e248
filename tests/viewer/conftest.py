"""Runs as workers and trainers leave them."""

from cli.conftest import make_trained, model_folder, started, trained

__all__ = ["make_trained", "model_folder", "started", "trained"]
