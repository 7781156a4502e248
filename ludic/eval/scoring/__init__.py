"""Score stored rollouts with a user's function, a reward model or an LLM judge, and append the scores to scores/."""
