"""The terminal viewer of a run, with textual: versions, groups, rollouts, one rollout, two side by side, labels."""
