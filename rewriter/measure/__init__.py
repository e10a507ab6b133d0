"""Measurements on real weights and text: drift, sensitivity, affinity."""
