"""Run a worker in this process: engine, guard and the loop of ludic.rollouts.worker.

Imports no planner and no trainer, so that workers stay small.
"""

import atexit
import gc
import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

from ludic.app.launch.guard import guarded
from ludic.app.show.watch import sampling_progress
from ludic.base import ENGINE
from ludic.engines import Engine, EngineConfig, EngineSetup, MakeEngine, engine_maker
from ludic.records import RolloutBatch
from ludic.rollouts import WorkerConfig, check_sampling_code, run_worker
from ludic.root import Root, is_over, newest_slot_claim
from ludic.root.weights import base_of_run, first_model, latest_policy, publish_policy
from ludic.run import located, prepare_code, run_of, sampling_uses
from ludic.settings import CodeSettings


def work(
    root: Root,
    config: WorkerConfig,
    stop: threading.Event,
    *,
    engine: str | EngineConfig | Engine | MakeEngine = ENGINE,
    device: str | None = None,
    model: str | None = None,
    code: CodeSettings | None = None,
    guard: bool = False,
    report: Callable[[RolloutBatch], None] | None = None,
) -> int:
    """Sample until `stop` is set or num_groups are committed; returns the number of committed groups.

    engine: name, see ludic.engines.registry; or its settings, an engine, or a function that makes one from a folder of
    weights and their version. device: for an engine given by name; None takes CUDA if available. model: location of the
    run's first model, if it is not where run.json says. guard: this process does nothing else; end it if a call of an
    environment can't be interrupted. report: called with each batch, instead of the progress that is shown on stderr.

    Raises SlotTakenError if another worker takes the slot, ConsentError, ConfigError or TimeLimitError.
    """
    run = run_of(root)
    if code is not None and code.is_given:
        prepare_code(root, sampling_uses(run), code, partial(check_sampling_code, located(run, root)))
    with ExitStack() as stack:
        base = stack.enter_context(base_of_run(root, model))
        setup = partial(
            EngineSetup,
            device=device,
            base=base,
            float32_head=run.float32_head,
            keep_experts=run.keep_experts,
            longrope=run.longrope,
            run_id=root.run_id,
        )
        make = as_maker(engine, setup)
        if guard:
            make = _frozen(make)
        announce = stack.enter_context(guarded(config.env_timeout_s if guard else None))
        progress = sampling_progress(config.num_groups) if report is None else nullcontext(report)
        return run_worker(root, config, make, stop, stack.enter_context(progress), announce)


def as_maker(engine: str | EngineConfig | Engine | MakeEngine, setup: Callable[..., EngineSetup]) -> MakeEngine:
    """Return the function that makes an engine. setup: makes the setup of one that is given by name or settings."""
    if isinstance(engine, str):
        engine = EngineConfig(engine=engine)
    if isinstance(engine, EngineConfig):
        return engine_maker(setup(config=engine))
    if callable(engine):
        return engine

    def load(folder: str, version: int) -> Engine:
        engine.load_weights(folder, version)
        return engine

    return load


def _frozen(make: MakeEngine) -> MakeEngine:
    """Return a maker that freezes loaded objects for the garbage collector, which saves 0.1 s per collection with
    vLLM."""

    def make_and_freeze(folder: str, version: int) -> Engine:
        engine = make(folder, version)
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # otherwise libraries print their leaks after the worker's last line
        return engine

    return make_and_freeze


def free_slot(root: Root) -> int | None:
    """Return the first slot of the schedule that no live worker holds; None if all are held."""
    for slot in range(run_of(root).num_workers):
        claim = newest_slot_claim(root, slot)
        if claim is None or is_over(claim):
            return slot
    return None


def publish_first(root: Root, model: str | None = None) -> None:
    """Publish the run's first model if nothing is published, so that a worker has weights without a trainer."""
    from ludic.training import copy_tokenizer, full_state_dict, load_model, save_weights

    if latest_policy(root) is not None:
        return
    with first_model(root, model) as source:

        def save(folder: Path) -> None:
            model = load_model(str(source))
            save_weights(model, full_state_dict(model), folder)
            copy_tokenizer(str(source), folder)

        publish_policy(root, save, step=0, attempt_id=0, parent_version=None)
