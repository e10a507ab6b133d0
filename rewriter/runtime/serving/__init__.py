"""Rewritten models in serving engines: what `rewrite serve` starts, what overlaps there, and a plugin of vLLM."""
