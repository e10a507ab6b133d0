"""Proof that a rewrite computes what it says: references, simulation, real ranks, drift on real weights."""
