"""Scores of stored rollouts, by a user's function or an LLM judge, appended to scores/."""
