"""The reference of tests/support/runtime_qwen.py: whole weights, one device, fp64, plain tensors. Imports nothing of
rewriter."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCAB, LAYERS, WINDOW = 32, 4, 2, 8, 48, 64, 4, 5


def weights(seed=10):
    """Whole parameters under transformers' names, large enough that a ladder differs from the original."""
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        for name, out in (
            ("q_proj", HEADS * HEAD),
            ("k_proj", KV_HEADS * HEAD),
            ("v_proj", KV_HEADS * HEAD),
            ("o_proj", HIDDEN),
        ):
            shapes[f"{at}self_attn.{name}.weight"] = (out, HEADS * HEAD if name == "o_proj" else HIDDEN)
            shapes[f"{at}self_attn.{name}.bias"] = (out,)
        for name in ("q_norm", "k_norm"):
            shapes[f"{at}self_attn.{name}.weight"] = (HEAD,)
        shapes[f"{at}mlp.gate_proj.weight"] = shapes[f"{at}mlp.up_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{at}mlp.down_proj.weight"] = (HIDDEN, INNER)
        shapes[f"{at}input_layernorm.weight"] = shapes[f"{at}post_attention_layernorm.weight"] = (HIDDEN,)
    random = torch.Generator().manual_seed(seed)

    def draw(name, shape):
        value = torch.randn(shape, generator=random)
        if "norm" in name:
            return 1 + 0.3 * value
        return value * (0.3 if name.endswith("bias") else 1.5 / math.sqrt(shape[1]))

    return {name: draw(name, shape) for name, shape in shapes.items()}


def shard(name, tensor, rank, ranks):
    """The rank's part of a whole parameter, or of its gradient."""
    heads = HEADS // ranks
    first, last = rank * heads * KV_HEADS // HEADS, ((rank + 1) * heads - 1) * KV_HEADS // HEADS
    if "k_proj" in name or "v_proj" in name:
        return tensor[first * HEAD : (last + 1) * HEAD]
    if any(part in name for part in ("q_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")):
        return tensor.chunk(ranks, 0)[rank]
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return tensor.chunk(ranks, 1)[rank]
    return tensor


def logits(w, ids, ladder_from):
    """[B, S, VOCAB] of unpadded rows of ids [B, S]; w in any dtype."""
    positions = torch.arange(ids.shape[1])
    inv = torch.tensor([10000 ** (-2 * i / HEAD) for i in range(HEAD // 2)])
    angles = (positions[:, None] * torch.cat([inv, inv])).to(next(iter(w.values())).dtype)
    h = p = w["model.embed_tokens.weight"][ids]
    for i in range(LAYERS):
        at = f"model.layers.{i}."

        def attn(x, at=at, window=WINDOW if i % 2 else None):
            return _attention(w, f"{at}self_attn.", _norm(x, w[f"{at}input_layernorm.weight"]), angles, window)

        def mlp(x, at=at):
            x = _norm(x, w[f"{at}post_attention_layernorm.weight"])
            gate = F.silu(x @ w[f"{at}mlp.gate_proj.weight"].T)
            return (gate * (x @ w[f"{at}mlp.up_proj.weight"].T)) @ w[f"{at}mlp.down_proj.weight"].T

        if i < ladder_from:
            p = h + attn(h)
            h = p + mlp(p)
        else:  # SEMANTICS.md: p' = h + attn(norm1(p)), h' = p' + mlp(norm2(h))
            p, h_read = h + attn(p), h
            h = p + mlp(h_read)
    return _norm(h, w["model.norm.weight"]) @ w["lm_head.weight"].T


def greedy(w, prompt, count, ladder_from):
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits(w, torch.tensor([ids]), ladder_from)[0, -1].argmax()))
    return ids[len(prompt) :]


def _norm(x, weight):
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def _attention(w, at, x, angles, window):
    def project(name, heads):
        return (x @ w[f"{at}{name}.weight"].T + w[f"{at}{name}.bias"]).unflatten(-1, (heads, HEAD))

    def rotate(y):
        y1, y2 = y.chunk(2, -1)
        return y * angles.cos()[:, None] + torch.cat([-y2, y1], -1) * angles.sin()[:, None]

    q = rotate(_norm(project("q_proj", HEADS), w[f"{at}q_norm.weight"]))
    k = rotate(_norm(project("k_proj", KV_HEADS), w[f"{at}k_norm.weight"])).repeat_interleave(HEADS // KV_HEADS, 2)
    v = project("v_proj", KV_HEADS).repeat_interleave(HEADS // KV_HEADS, 2)
    scores = torch.einsum("bshd,bthd->bhst", q, k) / math.sqrt(HEAD)
    s, t = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])
    seen = (t <= s) if window is None else (t <= s) & (t > s - window)
    o = torch.einsum("bhst,bthd->bshd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)
    return o.flatten(2) @ w[f"{at}o_proj.weight"].T + w[f"{at}o_proj.bias"]
