"""Where the blocks of a vLLM layer sum over ranks, and how the sum is left to the layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from vllm.model_executor.layers.fused_moe.runner.moe_runner_interface import MoERunnerInterface
from vllm.model_executor.layers.linear import RowParallelLinear

from rewriter.serving.schedule import Unsupported


def blocks_of(layer: nn.Module) -> Mapping[str, list[nn.Module]]:
    """The children of `layer` that sum over ranks, each with the modules inside it that do."""
    found = {name: _exits(child) for name, child in layer.named_children()}
    return {name: exits for name, exits in found.items() if exits}


def leave_out(exits: list[nn.Module], where: str, bound: bool) -> None:
    """Let the block return a rank's part of its sum. Raises Unsupported where it sums in more than one place, and where
    a `bound` model would need a bias on every rank."""
    if len(exits) != 1:
        raise Unsupported(f"{where} sums over ranks in {len(exits)} places")
    (one,) = exits
    if isinstance(one, RowParallelLinear):
        if bound and one.bias is not None:
            raise Unsupported(f"{where} has a bias, and the model's ranks go on with their own parts of the sum")
        one.reduce_results = False
        return
    config: Any = one.moe_config
    if config.is_sequence_parallel or config.moe_parallel_config.use_all2all_kernels:
        raise Unsupported(f"the experts of {where} are not tensor-parallel: give no expert parallelism")
    config.skip_final_all_reduce = True


def _exits(block: nn.Module) -> list[nn.Module]:
    rows = [m for m in block.modules() if isinstance(m, RowParallelLinear) and m.reduce_results]
    experts = [m for m in block.modules() if isinstance(m, MoERunnerInterface)]
    return [*rows, *experts]
