"""Weights: safetensors in, safetensors out, streamed. Pickled weights are never opened."""

from rewriter.weights.checkpoint import Checkpoint
from rewriter.weights.copying import convert_files
from rewriter.weights.shards import ShardPlan, plan_bytes

__all__ = ["Checkpoint", "ShardPlan", "convert_files", "plan_bytes"]
