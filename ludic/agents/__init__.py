"""Agents: from a request to the rollouts of one episode."""
