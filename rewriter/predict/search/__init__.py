"""The mix of rewrites that fits a model and a cluster: the fastest within a rise in loss (`run.search`)."""
