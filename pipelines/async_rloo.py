"""Two workers sample while a trainer trains: three processes that share only the root.

    python pipelines/async_rloo.py --root runs/async
    ludic sql runs/async "select step, avg(off_policy_steps), avg(episode_reward) from batches group by 1 order by 1"

`ludic run` does the same. Processes that die are restarted. `ludic worker ROOT` on another machine joins the run. After
a stop, the same command continues from the last checkpoint.
"""

from pathlib import Path

import ludic
from ludic.environments import WORDS
from ludic.models import make_tiny_model
from ludic.settings import run_script


def main(root: str = "runs/async", model: str = "runs/async-model", num_steps: int = 50, num_workers: int = 2) -> None:
    """Start the workers and the trainer, and wait until the trainer has finished.

    Args:
        root: Folder or URL of the run.
        model: Folder of the initial weights; if it does not exist, a tiny model is created there.
        num_steps: Gradient steps.
        num_workers: Processes that sample.
    """
    if not Path(model).exists():
        make_tiny_model(model, WORDS)
    run = ludic.create(
        root, model=model, env="moar_cats", num_workers=num_workers, max_tokens=32, accept_incomplete=True
    )
    done = run.run(num_steps=num_steps, advantage="rloo", learning_rate=4e-3, schedule="linear")
    (first, last) = ludic.connect(run.url).execute(REWARDS).fetchone() or (None, None)
    print(f"trained to step {done.step}; mean reward {first:.3f} at step 1, {last:.3f} at the last step")


REWARDS = """
with steps as (select step, avg(episode_reward) as reward from batches group by all)
select arg_min(reward, step), arg_max(reward, step) from steps
"""


if __name__ == "__main__":
    run_script(main, description=__doc__)
