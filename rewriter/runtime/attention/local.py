"""One call of the library's attention kernel on local tensors, forward and backward, with its log-sum-exp.

PyTorch has no public function that takes and returns the log-sum-exp on every device, so that the operators beneath
`scaled_dot_product_attention` are called here, and nowhere else:

| device | dtype | mask | operator |
|---|---|---|---|
| CPU | all | any | `_scaled_dot_product_flash_attention_for_cpu` |
| CUDA, from sm_80 on | fp16, bf16 | causal, full | `_scaled_dot_product_flash_attention` |
| CUDA | fp32, and what the above does not take | any | `_scaled_dot_product_efficient_attention` |

They disagree where queries and keys differ in number under a causal mask (top-left on CPU, bottom-right in
FlashAttention) and in what rows give that see no key. Here "causal" needs equally many of both, and such rows give 0
and a log-sum-exp of −inf.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rewriter.common.errors import RewriterError
from rewriter.kernels import accumulation_dtype

aten = torch.ops.aten

_FLASH_HEAD_SIZE = 256  # the widest head of FlashAttention on CUDA
_FLASH_DEVICE = (8, 0)  # the least compute capability that it runs on
_ALIGNED = 8  # elements: CUDA kernels read rows of heads in vectors of 16 bytes
_ALIGNED_LSE = 32  # the memory-efficient kernel's backward wants rows of log-sum-exps of a multiple of this
_ALIGNED_BIAS = 16  # elements: the distance of rows of a mask, as scaled_dot_product_attention pads it


@torch.library.custom_op("rewriter::tile_forward", mutates_args=())
def kernel_forward(
    q_BHSD: Tensor, k_BKTD: Tensor, v_BKTE: Tensor, seen: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """o_BHSE in q's dtype and lse_BHS in the accumulation dtype, both contiguous.

    `seen`: boolean [B or 1, 1, S, T], or None for all; `causal` needs S = T and no `seen`. Query head h reads key/value
    head h // (H / K). A row that sees no key has o = 0 and lse = −inf. Differentiable in q, k and v through o.
    Raises RewriterError where the device has no kernel for the dtype.
    """
    width = _width(q_BHSD, v_BKTE)
    q, k, v = (_widened(x, width) for x in (q_BHSD, k_BKTD, v_BKTE))
    bias = None if seen is None else _bias(seen, q)
    kernel = _kernel(q, bias)
    if kernel == "cpu":
        o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    elif kernel == "flash":
        o, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
    else:
        k, v = (_repeated(x, q.shape[1]) for x in (k, v))
        o, lse = aten._scaled_dot_product_efficient_attention(
            q, k, v, _expanded(bias, q, k), True, 0.0, causal, scale=scale
        )[:2]
    o, lse = o[..., : v_BKTE.shape[-1]].contiguous(), lse[..., : q.shape[2]].contiguous()
    if seen is not None:
        blind = ~seen.any(-1)  # [B or 1, 1, S]: what the kernels answer for these rows differs
        o, lse = o.masked_fill(blind.unsqueeze(-1), 0), lse.masked_fill(blind, -torch.inf)
    return o, lse


@kernel_forward.register_fake
def _(q_BHSD: Tensor, k_BKTD: Tensor, v_BKTE: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    o = q_BHSD.new_empty((*q_BHSD.shape[:-1], v_BKTE.shape[-1]))
    return o, q_BHSD.new_empty(q_BHSD.shape[:-1], dtype=accumulation_dtype(q_BHSD.dtype))


@torch.library.custom_op("rewriter::tile_backward", mutates_args=())
def kernel_backward(
    do_BHSE: Tensor,
    q_BHSD: Tensor,
    k_BKTD: Tensor,
    v_BKTE: Tensor,
    o_BHSE: Tensor,
    lse_BHS: Tensor,
    seen: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in q's dtype, contiguous, for the output and log-sum-exp *over all keys*, of which k and v may be a
    part.

    The kernels recompute exp(scale · q kᵀ − lse), the weights over all keys, and rowsum(do ∘ o); so the gradients of
    parts of the keys add up. A row with lse = −inf saw nothing anywhere and gets no gradient.
    """
    width = _width(q_BHSD, v_BKTE)
    do, q, k, v, o = (_widened(x.to(q_BHSD.dtype), width) for x in (do_BHSE, q_BHSD, k_BKTD, v_BKTE, o_BHSE))
    lse = lse_BHS.to(accumulation_dtype(q.dtype))
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # weights exp(x − inf) = 0 instead of NaN
    bias = None if seen is None else _bias(seen, q)
    kernel = _kernel(q, bias)
    if kernel == "cpu":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, o, lse.contiguous(), 0.0, causal, attn_mask=bias, scale=scale
        )
    elif kernel == "flash":
        # no dropout: the state of a random number generator is passed, but not read
        state, offset = (torch.zeros(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ()))
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            *(do, q, k, v, o, lse.contiguous()),
            *(None, None, q.shape[2], k.shape[2], 0.0, causal, state, offset),
            scale=scale,
        )
    else:
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        every_k, every_v = (_repeated(x, q.shape[1]) for x in (k, v))
        lse = F.pad(lse, [0, -lse.shape[-1] % _ALIGNED_LSE], value=torch.inf).contiguous()
        # it takes o to be in memory as its forward writes it, [B, S, H, E], without looking at the strides
        o = o.transpose(1, 2).contiguous().transpose(1, 2)
        dq, dk, dv = aten._scaled_dot_product_efficient_attention_backward(
            *(do, q, every_k, every_v, _expanded(bias, q, every_k), o, lse, state, state, 0.0),
            *([True, True, True, False], causal),
            scale=scale,
        )[:3]
        dk, dv = (_summed(dx, k.shape[1]) for dx in (dk, dv))
    sizes = q_BHSD.shape[-1], k_BKTD.shape[-1], v_BKTE.shape[-1]
    dq, dk, dv = (dx[..., :size].contiguous() for dx, size in zip((dq, dk, dv), sizes, strict=True))
    return dq, dk, dv


@kernel_backward.register_fake
def _(do_BHSE: Tensor, q_BHSD: Tensor, k_BKTD: Tensor, v_BKTE: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q_BHSD.new_empty(q_BHSD.shape), q_BHSD.new_empty(k_BKTD.shape), q_BHSD.new_empty(v_BKTE.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, seen, ctx.causal, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, seen)


def _gradients(ctx: Any, do: Tensor, _: None) -> tuple[Tensor | None, ...]:
    q, k, v, o, lse, seen = ctx.saved_tensors
    return (*kernel_backward(do, q, k, v, o, lse, seen, ctx.causal, ctx.scale), None, None, None)


kernel_forward.register_autograd(_gradients, setup_context=_save)


def in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """`tensors` cast as autocast, which knows no operators of ours, casts those of scaled_dot_product_attention: not
    fp64, and none outside of it.

    Queries and keys that were rotated are often fp32 there, where values are bf16.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _kernel(q: Tensor, bias: Tensor | None) -> str:
    """cpu | flash | efficient."""
    if q.device.type == "cpu":
        return "cpu"
    check_kernels(q)
    half = q.dtype in (torch.float16, torch.bfloat16) and torch.cuda.get_device_capability(q.device) >= _FLASH_DEVICE
    return "flash" if half and bias is None and q.shape[-1] <= _FLASH_HEAD_SIZE else "efficient"


def check_kernels(q: Tensor) -> None:
    """Raises RewriterError where q's device has no kernel for its dtype."""
    if q.device.type not in ("cpu", "cuda") or (q.device.type == "cuda" and q.dtype == torch.float64):
        raise RewriterError(
            f"attention over several ranks: no kernel returns log-sum-exps for {q.dtype} on {q.device.type}. Use fp32, "
            "bf16 or fp16 on CUDA, or any of them and fp64 on CPU"
        )


def _width(q: Tensor, v: Tensor) -> int:
    """The head size that q, k and v are widened to: kernels want one for all of them."""
    width = max(q.shape[-1], v.shape[-1])
    return width if q.device.type == "cpu" else -(-width // _ALIGNED) * _ALIGNED


def _widened(x: Tensor, width: int) -> Tensor:
    """Contiguous, heads filled up with zeros, which add nothing to scores and give outputs that are cut off."""
    missing = width - x.shape[-1]
    return (F.pad(x, [0, missing]) if missing else x).contiguous()  # a pad of nothing is a copy, too


def _bias(seen: Tensor, like: Tensor) -> Tensor:
    """Summand of the scores: 0 where seen, else −inf, in the dtype of `like`."""
    rows = -(-seen.shape[-1] // _ALIGNED_BIAS) * _ALIGNED_BIAS if like.is_cuda else seen.shape[-1]
    bias = torch.zeros((*seen.shape[:-1], rows), dtype=like.dtype, device=like.device)[..., : seen.shape[-1]]
    return bias.masked_fill_(~seen, -torch.inf)


def _expanded(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _repeated(x_BKTD: Tensor, heads: int) -> Tensor:
    """One key/value head per query head, for the kernel that knows no groups."""
    return x_BKTD if x_BKTD.shape[1] == heads else x_BKTD.repeat_interleave(heads // x_BKTD.shape[1], 1)


def _summed(dx_BHTD: Tensor, kv_heads: int) -> Tensor:
    """The gradient of a key/value head from those of its query heads, summed in fp32."""
    if dx_BHTD.shape[1] == kv_heads:
        return dx_BHTD
    return dx_BHTD.unflatten(1, (kv_heads, -1)).sum(2, dtype=torch.float32).to(dx_BHTD.dtype)
