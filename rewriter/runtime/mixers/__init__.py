"""Mixers that carry a state from token to token. `rewriter.ir.recurrences` is their specification."""
