"""GRPO by ludic, in the folder of benchmarks/against_trl.py; the arguments are seed and steps."""

import sys

import ludic


def on_topic(completion, answer):
    words = completion.split()
    return words.count(answer) / max(1, len(words))


def eight_words(completion):
    return -abs(len(completion.split()) - 8) / 8


seed, steps = map(int, sys.argv[1:])
sizes = {"group_size": 8, "groups_per_batch": 8, "max_tokens": 16, "accept_incomplete": True, "num_steps": steps}
loss = {"sql_params": {"epsilon": 1e-4}, "reference": "model", "kl_weight": 0.02}
optimizer = {"learning_rate": 3e-3, "schedule": "linear", "lora_rank": 16, "lora_alpha": 32}
on_policy = {"batches_ahead": 0, "max_off_policy_steps": 0, "eval_every": None, "seed": seed}
ludic.grpo(
    model="model",
    dataset="questions",
    heldout="heldout",
    reward={"on_topic": on_topic, "eight_words": (eight_words, 0.1)},
    root="ludic",
    **sizes,
    **loss,
    **optimizer,
    **on_policy,
)
