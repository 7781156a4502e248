"""Runs as workers and trainers leave them."""

from app.cli.conftest import breakable, make_trained, model_folder, started, trained

__all__ = ["breakable", "make_trained", "model_folder", "started", "trained"]
