"""Which mix of rewrites fits a model and a cluster: the fastest within a rise in loss. `run.search` is the way in."""
