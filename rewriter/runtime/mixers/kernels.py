"""Kernels of flash-linear-attention (`fla`) and `mamba_ssm` for sequences on CUDA, where these packages are installed.

Each function takes what a sequence operator takes and returns what it returns, or None where no kernel does that. Their
signatures are fla's of 0.3 to 0.6 and mamba_ssm's of 2.2 and 2.3; tests call stand-ins of these signatures, and
`benchmarks/gpu/mixers.py` runs them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)


def runs_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in _HALF


@cache
def _kernel(module: str, name: str, options: tuple[str, ...]) -> Callable[..., Any] | None:
    """The function, if it is installed and has all `options`: one without would compute something else."""
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception:  # of any kind: a package for another driver or torch fails while it is imported
        return None
    known = inspect.signature(function).parameters
    return function if all(option in known for option in options) else None


def delta_rule(
    q_BSGD: Tensor,
    k_BSGD: Tensor,
    v_BSHE: Tensor,
    g: Tensor,
    beta_BSH: Tensor,
    state: Tensor | None,
    l2norm: bool,
    scale: float,
    delta: bool,
) -> tuple[Tensor, Tensor] | None:
    """fla's chunk_gated_delta_rule, or chunk_kda for a decay of each key channel."""
    if not delta or not runs_kernels(v_BSHE):
        return None
    options = {
        "g": g.float(), "beta": beta_BSH.to(v_BSHE.dtype), "scale": scale, "initial_state": state,
        "output_final_state": True, "use_qk_l2norm_in_kernel": l2norm,
    }  # fmt: skip
    place = ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule") if g.dim() == 3 else ("fla.ops.kda", "chunk_kda")
    kernel = _kernel(*place, tuple(options))
    if kernel is None:
        return None
    heads = v_BSHE.shape[2] // k_BSGD.shape[2]
    q, k = (x.repeat_interleave(heads, 2).to(v_BSHE.dtype) for x in (q_BSGD, k_BSGD))
    o, state = kernel(q, k, v_BSHE.contiguous(), **options)
    return o, state.float()


def state_space(
    x_BSHP: Tensor,
    dt_BSH: Tensor,
    A_H: Tensor,
    B_BSGN: Tensor,
    C_BSGN: Tensor,
    D_H: Tensor | None,
    dt_bias_H: Tensor | None,
    state: Tensor | None,
    softplus: bool,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor] | None:
    """mamba_ssm's mamba_chunk_scan_combined."""
    if not runs_kernels(x_BSHP):
        return None
    options = {
        "chunk_size": 256, "D": D_H, "dt_bias": dt_bias_H, "initial_states": state, "dt_softplus": softplus,
        "dt_limit": (low, high), "return_final_states": True,
    }  # fmt: skip
    kernel = _kernel("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", tuple(options))
    if kernel is None:
        return None
    B, C = (m.to(x_BSHP.dtype) for m in (B_BSGN, C_BSGN))
    y, state = kernel(x_BSHP, dt_BSH, A_H.float(), B, C, **options)
    return y, state.float()


def selective_scan(
    x_BCS: Tensor,
    dt_BCS: Tensor,
    A_CN: Tensor,
    B_BNS: Tensor,
    C_BNS: Tensor,
    dt_bias_C: Tensor | None,
    state: Tensor | None,
    softplus: bool,
) -> tuple[Tensor, Tensor] | None:
    """mamba_ssm's selective_scan_fn, which begins from zeros."""
    if state is not None or not runs_kernels(x_BCS):
        return None
    bias = None if dt_bias_C is None else dt_bias_C.float()
    options = {"delta_bias": bias, "delta_softplus": softplus, "return_last_state": True}
    kernel = _kernel("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn", tuple(options))
    if kernel is None:
        return None
    dt, B, C = (m.to(x_BCS.dtype) for m in (dt_BCS, B_BNS, C_BNS))
    y, state = kernel(x_BCS, dt, A_CN.float(), B, C, **options)
    return y.float(), state.float()
