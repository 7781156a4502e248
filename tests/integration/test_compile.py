"""A run whose layers are compiled, beside one whose layers are not."""

import pytest
from tiny_runs import create_root, fill, make_model, query, train_here

from ludic.training.model import load_model

# torch's compiler warns of what it does itself.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]


def test_compiled_layers_train_alike_under_the_same_names(tmp_path):
    """The reference is the run's model, so that adapters go off and on between two calls of a layer.

    Without adapters: tests/training/test_cuda_like.py.
    """
    folder = make_model(tmp_path / "model")
    numbers, names = [], []
    for compiled in (False, True):
        root = create_root(str(tmp_path / f"compiled={compiled}"), folder)
        fill(root, num_files=2)
        settings = {"compile": compiled, "activation_checkpointing": True, "max_tokens_per_micro_batch": 100}
        settings |= {"lora_rank": 4, "reference": folder, "kl_weight": 0.1, "learning_rate": 1e-2}
        train_here(root, num_steps=3, **settings)
        numbers.append(
            query(root, "select loss, grad_norm, entropy, sampler_kl, reference_kl from metrics order by step")
        )
        names.append(list(load_model(root.at("policies/version=3"), strict=True).state_dict()))
    assert [pytest.approx(row, rel=1e-5, abs=1e-5) for row in numbers[0]] == numbers[1]
    assert numbers[0][2][-1] > 0
    assert names[0] == names[1]
