"""The fixtures of the trainer's tests."""

from training.conftest import mesh, model_folder, new_root, run_root, sequences, tiny_folder, tiny_model

__all__ = ["mesh", "model_folder", "new_root", "run_root", "sequences", "tiny_folder", "tiny_model"]
