"""Rewritten models in serving engines: what `rewrite serve` starts, and what overlaps there."""
