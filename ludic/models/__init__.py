"""Load and save models: weights, LoRA adapters, tokenizers, chat templates and the tiny model."""
