"""Files that start a run with Slurm, Kubernetes or SkyPilot, from one set of settings."""
