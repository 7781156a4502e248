"""Start the processes of a run on this machine, and end them together."""
