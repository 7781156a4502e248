"""Load and save models: weights, LoRA adapters, tokenizer and chat template, the tiny model; each once."""
