"""Devices of kernels: the presence of Triton, and the GPU that it launches on."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def runs_triton(x: Tensor) -> bool:
    """True if kernels can compute with `x`: on a GPU, and where Triton is. There is none for macOS and Windows."""
    return x.is_cuda and _has_triton()


def current_device(x: Tensor) -> AbstractContextManager[object]:
    """Within it the GPU of `x` is the current one, on which Triton launches; nothing for a CPU, where it interprets."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
