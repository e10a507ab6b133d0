"""From an output directory to a rank's module."""
