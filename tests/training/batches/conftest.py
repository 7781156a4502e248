"""The fixtures of the trainer's tests, and streams of the batches of each source."""

import threading

import pytest
from tiny_runs import train_config
from training.conftest import mesh, model_folder, new_root, run_root, sequences, tiny_folder, tiny_model

from ludic.root.attempts import start_attempt
from ludic.training.batches.stream import PlannedStream
from ludic.training.ownership import open_source
from ludic.training.publisher import Publisher

__all__ = ["mesh", "model_folder", "new_root", "run_root", "sequences", "tiny_folder", "tiny_model"]


@pytest.fixture
def open_stream(mesh):
    """open_stream(root, offline=True): a stream of one rank, of a new attempt, whose first plan was begun."""
    streams = []

    def open_(root, *, stop=None, **settings):
        config, stop, attempt = train_config(**settings), stop or threading.Event(), start_attempt(root)
        source = open_source(root, config, stop)
        publisher = Publisher(root, attempt, keep=None)
        source.resume(None, publisher)
        publisher.publish(lambda folder: None, step=0)
        streams.append(PlannedStream(root, config.batch, source, attempt, stop))
        streams[-1].start_plan(1, 0)
        return streams[-1]

    yield open_
    for stream in streams:
        stream.close()
