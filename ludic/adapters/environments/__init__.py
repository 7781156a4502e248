"""Environments of other packages, as ludic's: a file for each package, with its FAMILY."""
