"""The version matrix: `make matrix` installs the package with many versions of torch, transformers and Python, and runs
the smoke tests in each."""
