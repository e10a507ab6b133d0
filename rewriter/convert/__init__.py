"""The main job: from a checkpoint to a verified output directory, `rewrite MODEL --recipe NAME`."""
