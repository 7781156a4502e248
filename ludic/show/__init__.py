"""Show the state of a run, its statistics, and one rollout or group, as text and in a notebook."""
