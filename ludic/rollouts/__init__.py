"""Sample rollouts: workers, the schedule of groups, and the loading of new weights."""
