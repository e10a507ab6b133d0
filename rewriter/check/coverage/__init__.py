"""Every model type of transformers, tried."""
