"""Plan batches for the trainer from live, stored or replayed rollouts, and read and pack them for each rank."""
