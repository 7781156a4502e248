"""Write a run, its evaluations and a comparison as one HTML file that needs no network and runs no script."""
