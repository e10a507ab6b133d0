"""Layers with several states, written by hand as the emitter prints them: a gated delta net, attention beside Mamba 2,
and Mamba 1 before a linear recurrence. Two of each, so that layers of a class may share what is compiled."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from rewriter.runtime import (
    MaskSpec,
    RuntimeModel,
    SlotSpec,
    StateSpec,
    attention,
    causal_conv,
    delta_rule,
    linear_scan,
    selective_scan,
    state_space,
)

HIDDEN, VOCAB, HEADS, GROUPS, HEAD, STATE, TAPS = 16, 60, 4, 2, 4, 3, 4
MASK = MaskSpec("causal")
WIDE = HEADS * HEAD


def norm(x):
    return F.rms_norm(x, (x.shape[-1],))


class DeltaNet(nn.Module):
    def __init__(self, slot):
        super().__init__()
        self.slot = slot
        self.qkv = nn.Linear(HIDDEN, 2 * GROUPS * HEAD + WIDE, bias=False)
        self.ba = nn.Linear(HIDDEN, 2 * HEADS)
        self.taps = nn.Parameter(torch.empty(self.qkv.out_features, TAPS))
        self.out = nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, x, ctx):
        qkv = causal_conv(self.qkv(x).mT, self.taps, None, ctx, slot=self.slot, activation="silu").mT
        q, k, v = (y.unflatten(-1, (-1, HEAD)) for y in qkv.split([GROUPS * HEAD] * 2 + [WIDE], -1))
        beta, decay = self.ba(x).float().chunk(2, -1)
        gates = -F.softplus(decay), beta.sigmoid()
        o = delta_rule(q, k, v, *gates, ctx, slot=self.slot + 1, l2norm=True, scale=HEAD**-0.5)
        return self.out(o.flatten(2))


class SelfAttention(nn.Module):
    def __init__(self, slot):
        super().__init__()
        self.slot = slot
        self.qkv = nn.Linear(HIDDEN, 3 * WIDE, bias=False)
        self.out = nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, x, ctx):
        q, k, v = (y.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        o = attention(q, k, v, ctx, slot=self.slot, mask=MASK, scale=HEAD**-0.5)
        return self.out(o.transpose(1, 2).flatten(2))


class Mamba2(nn.Module):
    def __init__(self, slot):
        super().__init__()
        self.slot = slot
        self.xbc = nn.Linear(HIDDEN, WIDE + 2 * GROUPS * STATE, bias=False)
        self.dt = nn.Linear(HIDDEN, HEADS)
        self.taps, self.bias = (nn.Parameter(torch.empty(self.xbc.out_features, *s)) for s in ((TAPS,), ()))
        self.log_a, self.d = (nn.Parameter(torch.empty(HEADS)) for _ in range(2))
        self.out = nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, x, ctx):
        xbc = causal_conv(self.xbc(x).mT, self.taps, self.bias, ctx, slot=self.slot, activation="silu").mT
        y, b, c = xbc.split([WIDE] + [GROUPS * STATE] * 2, -1)
        y, b, c = y.unflatten(-1, (HEADS, HEAD)), b.unflatten(-1, (GROUPS, STATE)), c.unflatten(-1, (GROUPS, STATE))
        a, limit = -self.log_a.float().exp(), (0.0, float("inf"))
        y = state_space(y, self.dt(x), a, b, c, self.d, None, ctx, slot=self.slot + 1, softplus=True, limit=limit)
        return self.out(y.flatten(2))


class Mamba(nn.Module):
    def __init__(self, slot):
        super().__init__()
        self.slot = slot
        self.xz = nn.Linear(HIDDEN, 2 * WIDE, bias=False)
        self.taps = nn.Parameter(torch.empty(WIDE, TAPS))
        self.bc, self.dt = nn.Linear(WIDE, 2 * STATE, bias=False), nn.Linear(WIDE, WIDE)
        self.log_a, self.d = nn.Parameter(torch.empty(WIDE, STATE)), nn.Parameter(torch.empty(WIDE))
        self.out = nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, x, ctx):
        x, z = self.xz(x).mT.chunk(2, 1)
        x = causal_conv(x, self.taps, None, ctx, slot=self.slot, activation="silu")
        b, c = self.bc(x.mT).mT.chunk(2, 1)
        a, dt = -self.log_a.float().exp(), self.dt(x.mT).mT
        y = selective_scan(x, dt, a, b, c, self.d, z, None, ctx, slot=self.slot + 1, softplus=True).mT
        return self.out(linear_scan(y, -F.softplus(y), ctx, slot=self.slot + 2))


class DeltaLayer(nn.Module):
    slots = [StateSpec(((2 * GROUPS + HEADS) * HEAD, TAPS - 1), False), StateSpec((HEADS, HEAD, HEAD), True)]

    def __init__(self, slot):
        super().__init__()
        self.slot = slot
        self.linear_attn = DeltaNet(slot)

    def segment_0(self, x, ctx):
        return x + self.linear_attn(norm(x), ctx)


class HybridLayer(nn.Module):
    slots = [
        SlotSpec(HEADS, HEAD, HEAD),
        StateSpec((WIDE + 2 * GROUPS * STATE, TAPS - 1), False),
        StateSpec((HEADS, HEAD, STATE), True),
    ]

    def __init__(self, slot):
        super().__init__()
        self.self_attn, self.mamba = SelfAttention(slot), Mamba2(slot + 1)

    def segment_0(self, x, ctx):
        h = norm(x)
        return x + self.self_attn(h, ctx) + self.mamba(h, ctx)


class ScanLayer(nn.Module):
    slots = [StateSpec((WIDE, TAPS - 1), False), StateSpec((WIDE, STATE), True), StateSpec((WIDE,), True)]

    def __init__(self, slot):
        super().__init__()
        self.mixer = Mamba(slot)

    def segment_0(self, x, ctx):
        return x + self.mixer(norm(x), ctx)


class Model(RuntimeModel):
    def __init__(self, mesh=None, of_each=2):
        super().__init__(None)
        self.embed, self.lm_head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.layers, self.slots = nn.ModuleList(), []
        for kind in (DeltaLayer, HybridLayer, ScanLayer) * of_each:
            self.layers.append(kind(len(self.slots)))
            self.slots += kind.slots

    def compute(self, input_ids, position_ids, ctx, logits_to_keep=0, gather=True):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer.segment_0(x, ctx)
        return self.lm_head(norm(x)[:, -logits_to_keep:])


def weights():
    """In fp32, by name."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(x.shape, generator=generator) * (0.6 if x.dim() < 2 else x.shape[-1] ** -0.5)
        for name, x in Model().state_dict().items()
    }


def build(dtype=torch.float64, of_each=2):
    """With so many layers of each kind."""
    model = Model(None, of_each)
    model.load_state_dict(weights(), strict=of_each == 2)
    return model.to(dtype).eval()
