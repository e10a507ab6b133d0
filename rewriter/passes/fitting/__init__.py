"""Sizes of a model that any number of ranks divides, and where its weights go in them."""
