"""The fixtures of the trainer's tests, and a tiny model's tokenizer."""

from engines.conftest import model_folder as tokenizer_folder
from training.conftest import mesh, model_folder, new_root, run_root, sequences, tiny_folder, tiny_model

__all__ = ["mesh", "model_folder", "new_root", "run_root", "sequences", "tiny_folder", "tiny_model", "tokenizer_folder"]
