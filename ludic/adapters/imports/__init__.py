"""Import rollouts that other programs wrote: one function a format."""
