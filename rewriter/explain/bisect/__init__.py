"""Where a computation goes wrong: the first pass, layer and operator at which a rewritten model parts from what it
should compute."""
