"""Maintain a root: compact small files, expire old rows, verify files and quarantine broken ones."""
