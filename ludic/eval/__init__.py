"""Evaluate policies: sample held-out examples, measure them with error bars, compare in pairs. Needs no trainer."""
