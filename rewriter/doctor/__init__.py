"""Versions and devices of this machine, commands that work on it, and what is missing."""
