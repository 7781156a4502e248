"""Benchmarks of ludic against the alternatives; every ratio compares calls that took turns."""
