"""Environments: their protocols, ludic's own ones, questions from data, and calls within limits."""
