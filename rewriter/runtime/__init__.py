"""The code of a rank. Emitted modules import their building blocks from here; nothing here imports the compiler."""

from rewriter.ir.ops import MaskSpec, SequencePlan
from rewriter.ir.phases import PromptPhase
from rewriter.runtime.attention.cached import attention, store_keys
from rewriter.runtime.attention.chosen_keys import remember, top_keys
from rewriter.runtime.attention.key_blocks import block_starts, pool_blocks, remember_blocks
from rewriter.runtime.attention.mesh import sequence_mesh
from rewriter.runtime.attention.sequence_axis import SequenceAxis, Shards
from rewriter.runtime.cache import SequenceCache, SlotSpec, StateSpec, StaticCache
from rewriter.runtime.collectives.differentiable import (
    Shared,
    agreed,
    all_gather,
    all_reduce,
    all_reduce_start,
    once,
    own_ranges,
    own_shard,
    repeat_shard,
    share,
    shared_gradient,
)
from rewriter.runtime.collectives.exchange import Pending, all_reduce_wait
from rewriter.runtime.collectives.gradients import copy_to_group
from rewriter.runtime.collectives.log import Event, mark, record_events
from rewriter.runtime.collectives.process_groups import group_rank
from rewriter.runtime.compiled import compile_segments
from rewriter.runtime.context import Context, gather_tokens, last_tokens, shard_tokens
from rewriter.runtime.experts import experts
from rewriter.runtime.generation.generate import generate
from rewriter.runtime.loading import load
from rewriter.runtime.mixers.convolution import causal_conv, preceded
from rewriter.runtime.mixers.delta_rule import delta_rule
from rewriter.runtime.mixers.scans import linear_scan, selective_scan
from rewriter.runtime.mixers.state_space import state_space
from rewriter.runtime.module import LocalLogits, LossOutput, RuntimeModel
from rewriter.runtime.parallel import (
    ColumnParallelConv1D,
    ColumnParallelLinear,
    Conv1D,
    OffloadedEmbedding,
    PerRankConv1D,
    PerRankLayerNorm,
    PerRankLinear,
    RowParallelConv1D,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_embedding,
)
from rewriter.runtime.quantized.launch import quantized_all_reduce, quantized_all_reduce_start
from rewriter.runtime.replicas import sum_gradients
from rewriter.runtime.streams import fork

__all__ = [
    "ColumnParallelConv1D",
    "ColumnParallelLinear",
    "Context",
    "Conv1D",
    "Event",
    "LocalLogits",
    "LossOutput",
    "MaskSpec",
    "OffloadedEmbedding",
    "Pending",
    "PerRankConv1D",
    "PerRankLayerNorm",
    "PerRankLinear",
    "PromptPhase",
    "RowParallelConv1D",
    "RowParallelLinear",
    "RuntimeModel",
    "SequenceAxis",
    "SequenceCache",
    "SequencePlan",
    "Shards",
    "Shared",
    "SlotSpec",
    "StateSpec",
    "StaticCache",
    "VocabParallelEmbedding",
    "agreed",
    "all_gather",
    "all_reduce",
    "all_reduce_start",
    "all_reduce_wait",
    "attention",
    "block_starts",
    "causal_conv",
    "compile_segments",
    "copy_to_group",
    "delta_rule",
    "experts",
    "fork",
    "gather_tokens",
    "generate",
    "group_rank",
    "last_tokens",
    "linear_scan",
    "load",
    "mark",
    "once",
    "own_ranges",
    "own_shard",
    "pool_blocks",
    "preceded",
    "quantized_all_reduce",
    "quantized_all_reduce_start",
    "record_events",
    "remember",
    "remember_blocks",
    "repeat_shard",
    "selective_scan",
    "sequence_mesh",
    "shard_tokens",
    "share",
    "shared_gradient",
    "state_space",
    "store_keys",
    "sum_gradients",
    "top_keys",
    "vocab_embedding",
]
