"""Defaults that a command's help names and that a slow module uses."""

LEASE_S = 12.0
"""Default length of a lease, in seconds. Costs a put and two gets every 4 s: 13 cents a day on S3."""
ENV_TIMEOUT_S = 60.0
"""Default limit of one call of an environment, in seconds."""
TARGET_BYTES = 128 << 20
"""Default target size of a compacted file, counted as the bytes of its sources."""
STOP_WITHIN_S = 120
"""Default time to stop cleanly, in seconds. A checkpoint of 3 billion weights, 36 GB, takes 72 s at 0.5 GB/s."""
ENGINE = "transformers"
"""Default inference engine of workers."""
MAX_OBSERVATION_CHARACTERS = 1_000_000
"""About 250,000 tokens, more than most models read."""
