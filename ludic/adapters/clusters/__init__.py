"""Files that start a run with Slurm or Kubernetes, from one set of settings."""
