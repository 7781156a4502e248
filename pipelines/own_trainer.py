"""Your own training loop on ludic's batches: transformers and torch, without ludic's trainer.

    python pipelines/collect.py --root runs/collected --model FOLDER_OR_ID --num-groups 64
    python pipelines/own_trainer.py --root runs/collected

REINFORCE with leave-one-out baselines, which SQL computes while the previous batch is trained on. After a kill, it
continues after the last saved batch: the stream's state is stored with the weights.
"""

import json
from pathlib import Path

import torch

from ludic.root import Root
from ludic.settings import run_script
from ludic.training import load_model, token_logprobs
from ludic.training.batches import BatchConfig, BatchStream


def main(root: str = "runs/collected", output: str = "runs/own", epochs: int = 1, learning_rate: float = 1e-6) -> None:
    """Train on all rollouts of a run.

    Args:
        root: Folder or URL of the run.
        output: Folder for weights and state, after each batch.
        epochs: Passes over the rollouts.
        learning_rate: Learning rate of AdamW.
    """
    opened, folder = Root.open(root), Path(output)
    stream = BatchStream(opened, config=BatchConfig(advantage="rloo", filters=("drop_zero_variance_groups",)))
    state = folder / "stream.json"
    if state.exists():
        stream.load_state_dict(json.loads(state.read_text()))
    model = load_model(output if state.exists() else opened.record.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    while stream.epoch <= epochs:
        for batch in stream:
            for packed in batch.micro_batches:
                logprobs, _ = token_logprobs(model, packed, chunk_tokens=1024)
                ratios = (logprobs.detach() - packed.sampler_logprobs).exp().clamp(max=2.0)
                terms = ratios * packed.advantages * logprobs * packed.action_mask
                (-terms.sum() / batch.num_action_tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.save_pretrained(folder)
            state.write_text(json.dumps(stream.state_dict()))
            print(f"epoch {stream.epoch}  batch {batch.plan.step} of {len(stream)}")


if __name__ == "__main__":
    run_script(main, description=__doc__)
