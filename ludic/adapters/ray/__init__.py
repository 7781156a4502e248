"""A run on a Ray cluster."""
