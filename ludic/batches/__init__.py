"""Batches for the trainer: plans from live, stored or replayed rollouts, read and packed for each rank."""
