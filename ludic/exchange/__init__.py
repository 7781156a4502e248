"""Between a root and the rest of the world: tables over the same files, and rollouts that other programs wrote."""
