"""Products with few rows, as reductions that TorchInductor compiles for the CPU.

A decode step reads every weight once for one row. ATen's `linear` reads it at a quarter of the memory's bandwidth on
some processors; loops over rows of the weight that multiply and add, which is what Inductor makes of
`(x * weight).sum(-1)`, at two thirds and more on all that were tried (`benchmarks/decode.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from rewriter.kernels import accumulation_dtype

FEW_ROWS = 1
STREAMS = 4  # rows of the weight that are read at once: one alone does not keep the memory busy
_LINEAR = (F.linear, torch._C._nn.linear)  # Dynamo names the second


def with_reductions(backend: str) -> Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]:
    """The torch.compile backend `backend`, which is handed products of up to FEW_ROWS rows on the CPU as reductions."""
    from torch._dynamo.backends.registry import lookup_backend  # Dynamo takes a second to import

    compile_graph = lookup_backend(backend)

    def compile_with_reductions(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        if not torch.is_grad_enabled():
            for node in graph.graph.nodes:
                if node.op == "call_function" and node.target in _LINEAR and _few_rows(node.args[0]):
                    node.target = product
            graph.recompile()
        compiled: Callable[..., Any] = compile_graph(graph, inputs)
        return compiled

    return compile_with_reductions


class Reductions(TorchFunctionMode):
    """Within it, what is traced has reductions in place of products of up to FEW_ROWS rows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LINEAR and args[0].shape[:-1].numel() <= FEW_ROWS:
            func = product
        return func(*args, **(kwargs or {}))


def product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, summed in fp32 (fp64 of fp64): input [..., K], weight [N, K], bias [N]; [..., N] in input's dtype.

    A weight [..., N, K] is one for each row of the input.
    """
    wide = accumulation_dtype(input.dtype)
    row = in_memory(input.to(wide)).unsqueeze(-2)
    # of equal sizes, since Inductor makes one loop of those alone
    parts = weight.chunk(STREAMS if weight.shape[-2] % STREAMS == 0 else 1, -2)
    summed = torch.cat([(row * part.to(wide)).sum(-1) for part in parts], -1)
    return (summed if bias is None else summed + bias.to(wide)).to(input.dtype)


def in_memory(x: Tensor) -> Tensor:
    """`x`, which Inductor computes before what reads it, and not again in every iteration of a loop that does: of
    `as_strided` it wants an address."""
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())


def _few_rows(input: Any) -> bool:
    """Whether a node's value has so few rows, on the CPU, in every call."""
    value = input.meta.get("example_value") if isinstance(input, fx.Node) else None
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return False
    rows = value.shape[:-1]
    return all(isinstance(size, int) for size in rows) and rows.numel() <= FEW_ROWS
