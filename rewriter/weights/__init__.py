"""Weights: safetensors in, safetensors out, streamed. Pickled weights are never opened."""

from rewriter.weights.checkpoint import Checkpoint
from rewriter.weights.copy_files import ShardPlan, convert_files, plan_bytes, write_shards

__all__ = ["Checkpoint", "ShardPlan", "convert_files", "plan_bytes", "write_shards"]
