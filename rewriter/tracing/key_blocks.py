"""Modules that attend to blocks of tokens, as operators of `rewriter.ir.key_blocks`.

DeepSeek V4's compressors give attention a key for each block, and an indexer chooses among them; Qwen's block-sparse
indexer and GLM's of pools choose blocks whose tokens are seen. Each keeps half-finished blocks in a cache of its own
kind and loops or branches over them. What is recorded in their place is written here, in the operators, and used where
it gives the values of the module, of random weights: the operators themselves are a cache's too.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from rewriter.ir import args_of, ops
from rewriter.ir.key_blocks import blocks_touched
from rewriter.ir.op_semantics import aten, function_of, kind_of

_library = torch.library.Library("rewriter_trace", "FRAGMENT")
_library.define("pool_blocks(Tensor x, Tensor? gate, Tensor? bias, str options) -> Tensor")
_library.define("remember_blocks(Tensor x, str options) -> Tensor")
_library.define("block_starts(Tensor x, str options) -> Tensor")
_library.define("top_blocks(Tensor scores, str options) -> Tensor")
# what queries see: of entries of blocks, and of the tokens of blocks that were chosen
_library.define("entries_seen(Tensor entries, Tensor queries, Tensor? chosen, str options) -> Tensor")
_library.define("tokens_seen(Tensor chosen, str options) -> Tensor")
_traced = torch.ops.rewriter_trace


@torch.library.register_fake("rewriter_trace::pool_blocks", lib=_library)
def _pool_blocks(x: Tensor, gate: Tensor | None, bias: Tensor | None, options: str) -> Tensor:
    given = json.loads(options)
    width = x.shape[2] // 2 if given["overlap"] else x.shape[2]
    return x.new_empty(x.shape[0], blocks_touched(x.shape[1], given["size"]), width)


@torch.library.register_fake("rewriter_trace::remember_blocks", lib=_library)
def _remember_blocks(x: Tensor, options: str) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("rewriter_trace::block_starts", lib=_library)
def _block_starts(x: Tensor, options: str) -> Tensor:
    count = blocks_touched(x.shape[1], json.loads(options)["size"])
    return x.new_empty(x.shape[0], count, dtype=torch.int64)


@torch.library.register_fake("rewriter_trace::top_blocks", lib=_library)
def _top_blocks(scores: Tensor, options: str) -> Tensor:
    return scores.new_empty(*scores.shape[:2], json.loads(options)["count"], dtype=torch.int64)


@torch.library.register_fake("rewriter_trace::entries_seen", lib=_library)
def _entries_seen(entries: Tensor, queries: Tensor, chosen: Tensor | None, options: str) -> Tensor:
    return entries.new_empty(entries.shape[0], 1, queries.shape[1], entries.shape[1])


@torch.library.register_fake("rewriter_trace::tokens_seen", lib=_library)
def _tokens_seen(chosen: Tensor, options: str) -> Tensor:
    return chosen.new_empty(chosen.shape[0], 1, chosen.shape[1], chosen.shape[1], dtype=torch.bool)


class _Recording:
    """The operators, recorded."""

    def pool(self, x: Tensor, gate: Tensor | None, bias: Tensor | None, **options: Any) -> Tensor:
        return _traced.pool_blocks(x, gate, bias, json.dumps({"overlap": False, **options}))

    def remember(self, x: Tensor, size: int) -> Tensor:
        return _traced.remember_blocks(x, json.dumps({"size": size}))

    def starts(self, x: Tensor, size: int) -> Tensor:
        return _traced.block_starts(x, json.dumps({"size": size}))

    def top(self, scores: Tensor, count: int, size: int) -> Tensor:
        return _traced.top_blocks(scores, json.dumps({"count": count, "block": size}))

    def entries_seen(self, entries: Tensor, queries: Tensor, chosen: Tensor | None, size: int) -> Tensor:
        return _traced.entries_seen(entries, queries, chosen, json.dumps({"block": size}))

    def tokens_seen(self, chosen: Tensor, size: int) -> Tensor:
        return _traced.tokens_seen(chosen, json.dumps({"block": size}))


class _Computing(_Recording):
    """The operators, computed by their specification."""

    def pool(self, x: Tensor, gate: Tensor | None, bias: Tensor | None, **options: Any) -> Tensor:
        return ops.pool_blocks(x, gate, bias, None, slot=0, **options)

    def remember(self, x: Tensor, size: int) -> Tensor:
        return x

    def starts(self, x: Tensor, size: int) -> Tensor:
        return ops.block_starts(x, None, size=size)

    def top(self, scores: Tensor, count: int, size: int) -> Tensor:
        return ops.top_keys(scores, None, mask=ops.MaskSpec("causal"), count=count, block=size)

    def entries_seen(self, entries: Tensor, queries: Tensor, chosen: Tensor | None, size: int) -> Tensor:
        places = torch.arange(queries.shape[1])
        seen = ops.blocks_seen(places, entries.shape[1], size).expand(len(entries), -1, -1)
        return (seen if chosen is None else seen & ops.chosen_of(chosen, entries.shape[1]))[:, None]

    def tokens_seen(self, chosen: Tensor, size: int) -> Tensor:
        places = torch.arange(chosen.shape[1])
        return ops.keys_of_blocks(chosen, places, places, size)[:, None]


# --- the modules, written in the operators ---------------------------------------------------------------------------


def _entries(module: Any, x: Tensor, does: _Recording) -> Tensor:
    """The keys [B, T, D] of blocks, of a compressor or of the indexer inside one (DeepSeek V4)."""
    size, overlap = module.compress_rate, module.position_bias.shape[1] == 2 * module.head_dim
    gated = (module.kv_proj(x), module.gate_proj(x), module.position_bias)
    keys = module.kv_norm(does.pool(*gated, size=size, pooling="softmax", overlap=overlap))
    cos, sin = module.rotary_emb(keys, position_ids=does.starts(x, size), layer_type=module.rope_layer_type)
    return does.remember(_rotated_pairs(keys, cos, sin), size)


def _rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last channels of x, rotated by pairs in fp32; `cos` and `sin` have one channel for each pair."""
    cos, sin = (t.repeat_interleave(2, -1) for t in (cos, sin))
    still, turned = x[..., : -cos.shape[-1]], x[..., -cos.shape[-1] :].float()
    crossed = torch.stack((-turned[..., 1::2], turned[..., 0::2]), -1).flatten(-2)
    return torch.cat([still, (turned * cos + crossed * sin).to(x.dtype)], -1)


def _compressor(
    module: Any, x: Tensor, q_residual: Tensor, position_ids: Tensor, does: _Recording
) -> tuple[Tensor, Tensor]:
    """(keys [B, 1, T, D], what is added to scores of them [B, 1, S, T]): DeepSeek V4, sections 2.3.1 and 2.3.2."""
    entries, size = _entries(module, x, does), module.compress_rate
    chosen = None
    if (indexer := getattr(module, "indexer", None)) is not None:
        keys = _entries(indexer, x, does)
        q = indexer.q_b_proj(q_residual).view(*x.shape[:2], -1, indexer.head_dim)
        cos, sin = indexer.rotary_emb(x, position_ids=position_ids, layer_type=indexer.rope_layer_type)
        q = _rotated_pairs(q, cos.unsqueeze(2), sin.unsqueeze(2))
        chosen = does.top(indexer.scorer(q, keys, x), indexer.index_topk, size)
    return entries.unsqueeze(1), does.entries_seen(entries, x, chosen, size)


def _block_indexer(module: Any, x: Tensor, position_embeddings: tuple[Tensor, Tensor], does: _Recording) -> Tensor:
    """Which tokens are seen, [B, 1, S, T]: Qwen's block-sparse indexer."""
    cos, sin = position_embeddings
    heads, width, size = module.index_n_heads, module.index_head_dim, module.compress_ratio
    q, k = module.index_qk_proj(x).split([heads * width, module.index_kv_heads * width], -1)
    q = _rotated_halves(module.q_layernorm(q.unflatten(-1, (heads, width))), cos.unsqueeze(2), sin.unsqueeze(2))
    keys = module.k_layernorm(does.pool(k, None, None, size=size, pooling="mean"))
    begins = does.pool(torch.cat([cos, sin], -1).expand(x.shape[0], -1, -1), None, None, size=size, pooling="first")
    keys = does.remember(_rotated_halves(keys, *begins.chunk(2, -1)), size)
    scores = torch.relu(q.float() @ keys.float().transpose(1, 2).unsqueeze(1)).sum(2) / math.sqrt(width)
    return does.tokens_seen(does.top(scores, module.block_topk, size), size)


def _pool_indexer(module: Any, x: Tensor, q_residual: Tensor, does: _Recording) -> Tensor:
    """The blocks that are chosen, [B, S, n]: GLM 5.3's indexer of pools, of which the last, unfinished one is seen."""
    size = module.index_kpool
    gate = F.linear(x, module.index_kpool_compress_gate).float()
    pool = (module.k_norm(module.wk(x)), gate, module.index_kpool_compress_ape.float())
    keys = does.remember(does.pool(*pool, size=size, pooling="softmax"), size)
    q = module.wq_b(q_residual).unflatten(-1, (module.n_heads, module.head_dim)).float()
    scores = torch.relu(q @ keys.float().transpose(1, 2).unsqueeze(1) * module.softmax_scale)
    weights = module.weights_proj(x).float() * module.n_heads**-0.5
    return does.top((weights.unsqueeze(2) @ scores).squeeze(2), module.index_topk // size, size)


def _mask_of_chosen(size: int, topk_indices: Tensor, query_states: Tensor, kv_length: int) -> Tensor:
    """The mask added to scores, [B, 1, S, T], that an attention module makes of the blocks that were chosen."""
    batch, _, queries, _ = query_states.shape
    anchor = query_states.new_zeros(batch, queries, kv_length, dtype=torch.bool)
    causal = _traced.mask(anchor, [], "causal", None, query_states.dtype)
    seen = _Recording().tokens_seen(topk_indices, size)
    return causal.masked_fill(~seen, torch.finfo(query_states.dtype).min)


def _rotated_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first channels of x, as many as `cos` has, rotated by halves."""
    turned, still = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    a, b = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat((-b, a), -1) * sin, still], -1)


# --- which modules these are -----------------------------------------------------------------------------------------

_COMPRESSOR = ("kv_proj", "gate_proj", "position_bias", "kv_norm", "rotary_emb", "compress_rate", "head_dim")
_POOL_INDEXER = ("index_kpool", "index_kpool_compress_gate", "index_kpool_compress_ape", "wq_b", "wk", "k_norm")
_MASK_OF_CHOSEN = "build_attention_mask_from_topk"  # the method of an attention module
_CHOSEN = {"index_topk", "block_topk"}  # how many blocks are chosen; of the compared, fewer than there are
_BLOCK_INDEXER = ("index_qk_proj", "q_layernorm", "k_layernorm", "compress_ratio", "block_topk", "index_kv_heads")


_DRAWS = 5  # of weights and values: of few heads, several scores may be 0, and which is chosen is rounding


def modules_of_blocks(model: nn.Module) -> dict[nn.Module, Callable[..., Any]]:
    """By module, what records it in the operators; modules whose values differ from what is written here are left."""
    found: dict[nn.Module, Callable[..., Any]] = {}
    same: dict[str, bool] = {}
    for module in model.modules():
        if (written := _written(module)) is None:
            continue
        key = repr((type(module), _sizes(module)))
        if key not in same:
            same[key] = _agrees(module, written)
        if same[key]:
            found[module] = written(module, _Recording())
    return found


def _written(module: nn.Module) -> Callable[[Any, _Recording], Callable[..., Any]] | None:
    """The forward of a module of this shape in the operators."""
    if all(hasattr(module, name) for name in _COMPRESSOR):
        if hasattr(module, "scorer"):
            return None  # the indexer, which its compressor calls
        return lambda of, does: lambda x, q, position_ids, *_: _compressor(of, x, q, position_ids, does)
    if all(hasattr(module, name) for name in _BLOCK_INDEXER):
        return lambda of, does: lambda x, position_embeddings, *_: _block_indexer(of, x, position_embeddings, does)
    if all(hasattr(module, name) for name in _POOL_INDEXER):
        return lambda of, does: lambda hidden_states, q_resid, **_: _pool_indexer(of, hidden_states, q_resid, does)
    return None


@contextlib.contextmanager
def masks_of_chosen(model: nn.Module, of_blocks: Collection[nn.Module]) -> Iterator[None]:
    """Within it, attention modules that make a mask of the tokens that an indexer chose make it of the blocks."""
    sizes = {int(m.index_kpool) for m in of_blocks if hasattr(m, "index_kpool")}  # type: ignore[arg-type]
    with contextlib.ExitStack() as stack:
        for module in model.modules() if len(sizes) == 1 else ():
            if hasattr(module, _MASK_OF_CHOSEN):
                mask = functools.partial(_mask_of_chosen, next(iter(sizes)))
                stack.enter_context(mock.patch.object(module, _MASK_OF_CHOSEN, mask))
        yield


def _sizes(module: nn.Module) -> list[Any]:
    numbers = [(n, v) for m in module.modules() for n, v in vars(m).items() if isinstance(v, (int, float, str))]
    return [*numbers, *((n, tuple(t.shape)) for n, t in module.state_dict().items())]


def _agrees(module: nn.Module, written: Callable[[Any, _Recording], Callable[..., Any]]) -> bool:
    """True if `module` computes what is written, of random weights and rows of a few blocks and a part."""
    try:
        real = copy.deepcopy(module).to_empty(device="cpu").float()
        for part in real.modules():
            for name in _CHOSEN & vars(part).keys():
                setattr(part, name, 2 * getattr(part, "index_kpool", 1))
        own = written(real, _Computing())
        with torch.no_grad(), torch.device("cpu"):
            return any(_same_of(real, own, torch.Generator().manual_seed(seed)) for seed in range(_DRAWS))
    except Exception:  # a model's own code, on values of ours
        return False


def _same_of(real: nn.Module, own: Callable[..., Any], draw: torch.Generator) -> bool:
    for tensor in (*real.parameters(), *real.buffers()):
        tensor.data = torch.randn(tensor.shape, generator=draw) / math.sqrt(tensor.shape[-1])
    return all(_same(real, own, draw, blocks) for blocks in (0, 7))


def _same(real: Any, own: Callable[..., Any], draw: torch.Generator, blocks: int) -> bool:
    size = next(getattr(real, n) for n in ("compress_rate", "compress_ratio", "index_kpool") if hasattr(real, n))
    tokens = blocks * size + size - 1

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    if hasattr(real, "compress_rate"):
        x, places = drawn(2, tokens, real.kv_proj.in_features), torch.arange(tokens)[None]
        q = drawn(2, tokens, real.indexer.q_b_proj.in_features if hasattr(real, "indexer") else 1)
        keys, added = real(x, q, places, None, 0)
        own_keys, seen = own(x, q, places)
        if keys.shape[2] != blocks or not torch.allclose(own_keys[:, :, :blocks], keys, rtol=1e-4, atol=1e-5):
            return False
        return added is None or torch.equal(seen[..., :blocks], added.expand(2, -1, -1, -1) == 0)
    if hasattr(real, "index_kpool"):
        x, q = drawn(2, tokens, real.wk.in_features), drawn(2, tokens, real.wq_b.in_features)
        chosen = real(x, q, torch.ones(2, tokens, dtype=torch.bool), None).long()
        columns = torch.zeros(2, tokens, tokens + 1, dtype=torch.bool)
        seen = columns.scatter(2, chosen.where(chosen >= 0, torch.tensor(tokens)), True)[:, None, :, :-1]
        return torch.equal(_Computing().tokens_seen(own(x, q), size) & causal, seen)
    x = drawn(2, tokens, real.index_qk_proj.in_features)
    angles = torch.arange(tokens)[:, None] * torch.rand(real.index_head_dim // 2, generator=draw)
    angles = torch.cat([angles, angles], -1).expand(2, -1, -1)
    rotary = (angles.cos(), angles.sin())
    return torch.equal(own(x, rotary) & causal, real(x, rotary, causal, None) & causal)


# --- in the graph ----------------------------------------------------------------------------------------------------


def conversions() -> dict[Any, tuple[Any, bool]]:
    """By recorded operator, (the operator of the IR, whether it has a slot)."""
    return {
        _traced.pool_blocks.default: (ops.pool_blocks, True),
        _traced.remember_blocks.default: (ops.remember_blocks, True),
        _traced.block_starts.default: (ops.block_starts, False),
        _traced.top_blocks.default: (ops.top_keys, False),
    }


def attend_to_blocks(attention: fx.Node) -> bool:
    """Take what is seen of blocks out of the mask of an attention node, in place, into its options; True if there was
    any.

    Its mask is that of the tokens beside what is seen of entries, which are the last of its keys and values, or the
    former where only tokens of chosen blocks are seen.
    """
    mask = attention.kwargs.get("bias")
    if not isinstance(mask, fx.Node):
        return False
    q, keys, values, ctx = args_of(attention)[:4]
    if _is_join(mask, 3) and (joined := _uncast(args_of(mask)[0][1])).target is _traced.entries_seen.default:
        entries, _, chosen, options = args_of(joined)
        if not all(_is_join(x, 2) and _unwrapped(args_of(x)[0][1]) is entries for x in (keys, values)):
            return False
        own = (args_of(x)[0][0] for x in (keys, values))
        attention.args = (q, *own, ctx)
        more = {"entries": args_of(keys)[0][1], "keys": chosen, "bias": args_of(mask)[0][0]}
    elif (seen := _tokens_alone_seen(mask)) is not None:
        chosen, options = args_of(seen)
        more = {"keys": chosen, "bias": args_of(mask)[0]}
    else:
        return False
    given = {**attention.kwargs, **more, **json.loads(options)}
    attention.kwargs = {name: value for name, value in given.items() if value is not None}
    return True


def _is_join(node: Any, dim: int) -> bool:
    joined = isinstance(node, fx.Node) and node.target in (aten.cat.default, aten.concat.default)
    return joined and len(args_of(node)[0]) == 2 and args_of(node)[1] % args_of(node)[0][0].meta["val"].dim() == dim


def _uncast(node: fx.Node) -> fx.Node:
    while kind_of(node) == "cast":
        node = args_of(node)[0]
    return node


def _unwrapped(node: fx.Node) -> fx.Node:
    while node.target is aten.unsqueeze.default or kind_of(node) == "cast":
        node = args_of(node)[0]
    return node


def _tokens_alone_seen(mask: fx.Node) -> fx.Node | None:
    """The tokens that are seen, of a mask that denies all others: it is filled for them or, by the indexer of
    transformers 5.17, what the indexer gives is added to it."""
    other = args_of(mask)[1] if function_of(mask) in ("masked_fill", "add") else None
    seen = _uncast(other) if isinstance(other, fx.Node) else None
    negations: Iterable[Any] = (aten.bitwise_not.default, aten.logical_not.default)
    if seen is not None and function_of(mask) == "masked_fill":
        seen = args_of(seen)[0] if seen.target in negations else None
    return seen if seen is not None and seen.target is _traced.tokens_seen.default else None
