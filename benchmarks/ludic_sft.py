"""Supervised fine-tuning by ludic for benchmarks/sft_rows.py: one step. The arguments are the model and the rows."""

import sys

import ludic

model, rows = sys.argv[1:]
ludic.sft(model=model, dataset=rows, root="ludic", groups_per_batch=8, num_steps=1)
