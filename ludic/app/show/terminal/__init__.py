"""View a run in the terminal with textual: lists of versions, groups and rollouts, single rollouts, and labels."""
