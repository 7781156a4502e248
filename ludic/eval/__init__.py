"""Evaluate policies: sample held-out examples, measure them with error bars, compare in pairs. Depends on no
trainer."""
