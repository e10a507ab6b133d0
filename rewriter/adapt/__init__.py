"""Healing: light fine-tuning of a rewritten model, `rewrite adapt`."""
