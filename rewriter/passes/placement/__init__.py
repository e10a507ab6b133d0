"""Splitting bodies over ranks: entry projections by output, exit projections by input."""
