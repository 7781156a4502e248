"""The roots and files of the store's tests, and runs as workers and trainers leave them."""

from app.cli.conftest import make_trained, model_folder, started
from root.conftest import failures_surface_at_once, next_batch, put_file, root_url, s3_proxy, unreliable_root

__all__ = [
    "failures_surface_at_once",
    "make_trained",
    "model_folder",
    "next_batch",
    "put_file",
    "root_url",
    "s3_proxy",
    "started",
    "unreliable_root",
]
