"""A tensor-parallel Qwen3, written by hand as the emitter prints it: standard layers, then ladder layers.

It stands for an emitted module.py in the tests of the runtime, which import it and also copy it into output
directories.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rewriter.runtime import (
    ColumnParallelLinear,
    MaskSpec,
    RowParallelLinear,
    RuntimeModel,
    SequenceAxis,
    Shared,
    SlotSpec,
    VocabParallelEmbedding,
    all_gather,
    all_reduce,
    all_reduce_start,
    all_reduce_wait,
    attention,
    copy_to_group,
    gather_tokens,
    last_tokens,
    shard_tokens,
)

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCAB, LAYERS, WINDOW, LADDER_FROM = 32, 4, 2, 8, 48, 64, 4, 5, 1
MASKS = [MaskSpec("causal"), MaskSpec("window", WINDOW)] * (LAYERS // 2)


class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.normalise(x, self.weight)

    @staticmethod
    def normalise(x, weight):
        x32 = x.float()
        return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, tp, slot):
        super().__init__()
        ranks, rank = (tp.size(), tp.rank()) if tp is not None else (1, 0)
        self.tp, self.slot, self.mask = tp, slot, MASKS[slot]
        heads = HEADS // ranks
        first, last = rank * heads * KV_HEADS // HEADS, ((rank + 1) * heads - 1) * KV_HEADS // HEADS
        shared = Shared(KV_HEADS * HEAD, ((first * HEAD, (last + 1) * HEAD),), tp)
        self.q_proj = ColumnParallelLinear(HIDDEN, heads * HEAD, bias=True)
        self.k_proj = ColumnParallelLinear(HIDDEN, shared.rows, bias=True, shared=shared)
        self.v_proj = ColumnParallelLinear(HIDDEN, shared.rows, bias=True, shared=shared)
        self.o_proj = RowParallelLinear(heads * HEAD, HIDDEN, bias=True, group=tp)
        self.q_norm, self.k_norm = RMSNorm(HEAD), RMSNorm(HEAD)

    def forward(self, x, cos, sin, ctx):
        x = copy_to_group(x, self.tp)
        q, k, v = (p(x).unflatten(-1, (-1, HEAD)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q = RMSNorm.normalise(q, copy_to_group(self.q_norm.weight, self.tp)).transpose(1, 2)
        k = RMSNorm.normalise(k, copy_to_group(self.k_norm.weight, self.tp)).transpose(1, 2)
        q, k, v = rotate(q, cos, sin), rotate(k, cos, sin), v.transpose(1, 2)
        o = attention(q, k, v, ctx, slot=self.slot, mask=self.mask, scale=HEAD**-0.5)
        return self.o_proj(o.transpose(1, 2).flatten(2))


def rotate(x, cos, sin):
    cos, sin = cos[:, None], sin[:, None]
    return x * cos + torch.cat([-x[..., HEAD // 2 :], x[..., : HEAD // 2]], -1) * sin


class MLP(nn.Module):
    def __init__(self, tp):
        super().__init__()
        ranks = 1 if tp is None else tp.size()
        self.tp = tp
        self.gate_proj = ColumnParallelLinear(HIDDEN, INNER // ranks, bias=False)
        self.up_proj = ColumnParallelLinear(HIDDEN, INNER // ranks, bias=False)
        self.down_proj = RowParallelLinear(INNER // ranks, HIDDEN, bias=False, group=tp)

    def forward(self, x):
        x = copy_to_group(x, self.tp)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, tp, slot):
        super().__init__()
        self.tp, self.name = tp, f"layers.{slot}"
        self.self_attn, self.mlp = Attention(tp, slot), MLP(tp)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(HIDDEN), RMSNorm(HIDDEN)

    def segment_0(self, x, arrived, cos, sin, ctx):
        x = x + arrived
        return x, self.self_attn(self.input_layernorm(x), cos, sin, ctx)

    def segment_1(self, x, arrived):
        x = x + arrived
        return x, self.mlp(self.post_attention_layernorm(x))


class StandardLayer(Layer):
    def forward(self, x, pending_attn, pending_mlp, cos, sin, ctx):
        x, partial = self.segment_0(x, all_reduce_wait(pending_mlp), cos, sin, ctx)
        attn = all_reduce_wait(all_reduce_start(partial, self.tp, f"{self.name}.attn"))
        x, partial = self.segment_1(x, attn)
        return x, x.new_zeros(1), all_reduce_start(partial, self.tp, f"{self.name}.mlp")


class LadderLayer(Layer):
    def forward(self, x, pending_attn, pending_mlp, cos, sin, ctx):
        x, partial = self.segment_0(x, all_reduce_wait(pending_attn), cos, sin, ctx)
        attn = all_reduce_start(partial, self.tp, f"{self.name}.attn")
        x, partial = self.segment_1(x, all_reduce_wait(pending_mlp))
        return x, attn, all_reduce_start(partial, self.tp, f"{self.name}.mlp")


class Body(nn.Module):
    def __init__(self, tp, ladder_from):
        super().__init__()
        self.tp = tp
        self.embed_tokens = VocabParallelEmbedding(VOCAB // (1 if tp is None else tp.size()), HIDDEN, group=tp)
        self.layers = nn.ModuleList(
            (LadderLayer if index >= ladder_from else StandardLayer)(tp, index) for index in range(LAYERS)
        )
        self.norm = RMSNorm(HIDDEN)
        frequencies = torch.tensor([10000 ** (-2 * i / HEAD) for i in range(HEAD // 2)])
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, input_ids, position_ids, ctx):
        x = all_reduce(self.embed_tokens(input_ids), self.tp, "embed")
        angles = position_ids[..., None] * torch.cat([self.inv_freq, self.inv_freq])
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        attn, mlp = x.new_zeros(1), x.new_zeros(1)
        for layer in self.layers:
            x, attn, mlp = layer(x, attn, mlp, cos, sin, ctx)
        return self.norm(x + all_reduce_wait(attn) + all_reduce_wait(mlp))


class Model(RuntimeModel):
    def __init__(self, mesh, ladder_from=LADDER_FROM, plan=None):
        super().__init__(mesh if isinstance(mesh, DeviceMesh) else None)
        if plan is not None:
            self.sequence = SequenceAxis(mesh, plan)
        self.tp = mesh.get_group("tp") if hasattr(mesh, "get_group") else mesh
        self.model = Body(self.tp, ladder_from)
        ranks = 1 if self.tp is None else self.tp.size()
        self.lm_head = ColumnParallelLinear(HIDDEN, VOCAB // ranks, bias=False)
        kv_heads = self.model.layers[0].self_attn.k_proj.out_features // HEAD
        self.slots = [SlotSpec(kv_heads, HEAD, HEAD, mask.size) for mask in MASKS]

    def compute(self, input_ids, position_ids, ctx, logits_to_keep=0, gather=True):
        input_ids, position_ids = shard_tokens(input_ids, ctx), shard_tokens(position_ids, ctx)
        x = self.model(input_ids, position_ids, ctx)
        x = copy_to_group(last_tokens(x, logits_to_keep, ctx), self.tp)
        logits = all_gather(self.lm_head(x), self.tp, -1, "head")
        return gather_tokens(logits, ctx) if gather else logits


class StandardModel(Model):
    def __init__(self, mesh):
        super().__init__(mesh, ladder_from=LAYERS)
