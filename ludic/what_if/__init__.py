"""Look again at a finished run: other rules for its batches, the first step of a fault, a copy of one step."""
