"""Show the state of a run, its statistics, and single rollouts or groups, as text, in a notebook and in a viewer."""
