"""The demo's run: a tiny model learns to say "love cats" on this machine, in a minute, without downloads.

Two workers and a trainer are separate processes that share only the root's folder of Parquet files.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ludic.agents.agent import Agent
from ludic.code.kept import create_root
from ludic.engines.transformers_engine import TransformersEngine
from ludic.environments.moar_cats import WORDS
from ludic.launch.config import LaunchConfig
from ludic.models.chat import load_tokenizer
from ludic.models.first_model import remember_model
from ludic.models.tiny import make_tiny_model
from ludic.records import Rollout
from ludic.rollouts.sampler import GroupSampler
from ludic.store import Root, RunConfig
from ludic.store.catalogue import MODEL
from ludic.store.weights import identify, keep_model
from ludic.training.config import TrainConfig

NUM_WORKERS = 2
# Further words of the model's vocabulary.
OTHER_WORDS = (
    "i you we they he she it is are was be have has do does can will would like love hate want see hear know think "
    "dogs dog birds bird fish mouse mice horse cow house home garden tree river sea sky sun moon star day night "
    "morning evening summer winter red blue green white black big small long short old new good bad happy sad fast "
    "slow warm cold soft loud quiet very so too and or but not no yes with without from to in on at for of my your "
    "our their this that here there now then always never often again more most some many all eat drink sleep run "
    "walk jump play sing dance work read write look find make take give come go"
)


def open_demo(url: str) -> Root:
    """Start the run with a new tiny model that is stored in its root, or open the existing run."""
    url = url.rstrip("/")
    root = create_root(
        url,
        RunConfig(
            model=f"{url}/{MODEL.folder}",
            env=("moar_cats",),
            group_size=8,
            groups_per_batch=8,
            num_workers=NUM_WORKERS,
            # One batch is planned while another trains; a second keeps the trainer from waiting.
            batches_ahead=2,
            max_tokens=32,
            # A model with random weights never ends its answers.
            accept_incomplete=True,
        ),
    )
    keep_new_model(root, partial(make_tiny_model, words=[*WORDS, OTHER_WORDS]))
    return root


def keep_new_model(root: Root, make: Callable[[str], None]) -> None:
    """Store a new model in the root, unless it has one. make: writes the model to a folder."""
    if root.exists(f"{MODEL.folder}/config.json"):
        remember_model(root)
        return
    with root.scratch_folder() as folder:
        make(str(folder))
        keep_model(root, folder, identify(folder, root.run.model), with_weights=True)


def demo_config(num_steps: int) -> TrainConfig:
    """Return settings for RLOO with truncated importance sampling.

    The learning rate suits 100k parameters; without its decay the last steps overshoot.
    """
    return TrainConfig.of(
        num_steps=num_steps,
        learning_rate=4e-3,
        schedule="cosine",
        is_ratio_cap=2.0,
        # Attention cost grows with the square of the packed tokens: on a CPU, small micro-batches are faster.
        max_tokens_per_micro_batch=512,
        device="cpu",
        checkpoint_every=20,
    )


def demo_processes() -> LaunchConfig:
    """Return settings of the processes: new weights wait for the end of answers.

    In a step this model changes so much that answers whose weights change under way teach it less.
    """
    return LaunchConfig(swap="completion")


def heldout_answers(root: Root, folder: str, num_prompts: int = 32, temperature: float = 0.8) -> list[Rollout]:
    """Sample one answer to each of the first held-out prompts, which the run never trained on."""
    agent = Agent(
        engine=TransformersEngine(folder, device="cpu"), tokenizer=load_tokenizer(folder), model=root.run.model
    )
    sampler = GroupSampler.of_run(replace(root.run, group_size=1, temperature=temperature), agent)
    groups = sampler.sample(range(num_prompts), worker_id="demo", split="heldout").groups
    return [rollout for group in groups for rollout in group.rollouts]
