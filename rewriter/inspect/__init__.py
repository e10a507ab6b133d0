"""What a model reads, writes and communicates, before and after a recipe: `rewrite inspect`."""
