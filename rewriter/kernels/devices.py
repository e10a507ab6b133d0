"""Devices of kernels: the presence of Triton, and the GPU that it launches on."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor


@cache
def has_triton() -> bool:
    """True if the kernels can be imported: there is no Triton for macOS and Windows."""
    return importlib.util.find_spec("triton") is not None


def current_device(x: Tensor) -> AbstractContextManager[object]:
    """Within it the GPU of `x` is the current one, on which Triton launches; nothing for a CPU, where it interprets."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
