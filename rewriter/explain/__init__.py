"""Models explained: inspected, compared with another one, bisected for the place where it goes wrong."""
