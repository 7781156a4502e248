"""Start the processes of a run on this machine, supervise them, and end them together."""
