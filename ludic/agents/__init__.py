"""Play an episode with agents: from a request to its rollouts."""
