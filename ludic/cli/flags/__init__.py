"""Flags of each command, as a dataclass `Settings` a module. Imports nothing slow, so that --help answers at once."""
