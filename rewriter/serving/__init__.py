"""Serving rewritten models: the engines that people use."""
