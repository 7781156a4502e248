"""Export a run: Delta and Iceberg tables over the same files, rows as text, weights."""
