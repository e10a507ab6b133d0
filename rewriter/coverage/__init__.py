"""What works on which type of model: every causal LM that transformers registers, shrunken, rewritten and compared."""
