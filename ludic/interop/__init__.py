"""Exchange with other programs: tables over a root's files, exports of rows and weights, and imports of rollouts."""
