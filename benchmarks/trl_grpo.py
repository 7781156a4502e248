"""GRPO by TRL 1.16, in the folder of benchmarks/against_trl.py; the arguments are seed and steps."""

import sys

from datasets import load_from_disk
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer


def on_topic(completions, answer, **columns):
    texts = [completion[0]["content"].split() for completion in completions]
    return [words.count(wanted) / max(1, len(words)) for words, wanted in zip(texts, answer, strict=True)]


def eight_words(completions, **columns):
    return [-abs(len(completion[0]["content"].split()) - 8) / 8 for completion in completions]


seed, steps = map(int, sys.argv[1:])
sizes = {"num_generations": 8, "per_device_train_batch_size": 64, "max_completion_length": 16, "max_steps": steps}
loss = {"loss_type": "grpo", "scale_rewards": "group", "epsilon": 0.2, "reward_weights": [1.0, 0.1]}
loss |= {"beta": 0.02, "use_bias_correction_kl": False}  # k3 itself, as ludic's default
optimizer = {"learning_rate": 3e-3, "lr_scheduler_type": "linear", "max_grad_norm": 1.0}
machine = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "seed": seed}
GRPOTrainer(
    model="model",
    reward_funcs=[on_topic, eight_words],
    train_dataset=load_from_disk("questions")["train"],
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    args=GRPOConfig(output_dir="trl", **sizes, **loss, **optimizer, **machine),
).train()
