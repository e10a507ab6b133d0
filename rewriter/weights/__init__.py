"""Weights: safetensors in, safetensors out, streamed. Pickled weights are never opened."""

from rewriter.weights.checkpoint import Checkpoint
from rewriter.weights.copy_files import ShardPlan, convert_files, plan_bytes, write_shards
from rewriter.weights.header import TensorInfo
from rewriter.weights.space import require_space

__all__ = [
    "Checkpoint",
    "ShardPlan",
    "TensorInfo",
    "convert_files",
    "plan_bytes",
    "require_space",
    "write_shards",
]
