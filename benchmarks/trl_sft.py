"""Supervised fine-tuning by TRL 1.16 for benchmarks/sft_rows.py: one step. The arguments are the model and the rows."""

import sys

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

model, rows = sys.argv[1:]
machine = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none"}
SFTTrainer(
    model=model,
    train_dataset=load_dataset("json", data_files=rows, split="train"),
    args=SFTConfig(output_dir="trl", assistant_only_loss=True, per_device_train_batch_size=8, max_steps=1, **machine),
).train()
