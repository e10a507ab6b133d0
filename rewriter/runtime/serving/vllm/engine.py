"""The plugin's calls of vLLM while a model runs: one object, so that the rest runs, and is tested, without vLLM."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class VllmEngine:
    """vLLM's group of tensor-parallel ranks, with the all-reduce that vLLM has chosen for it. On CPUs small sums go
    through sockets: begun without a thread, which would take the core that computes."""

    rows: Any = None  # `phases.Rows` of the batch that runs now, where some of its tokens are rewired
    connected: Any = None  # the group whose small sums go through sockets, where they can

    @property
    def group(self) -> Any:
        from vllm.distributed.parallel_state import get_tp_group

        return get_tp_group()

    def ranks(self) -> int:
        """The number of ranks of the group."""
        return int(self.group.world_size)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of `x` over the ranks, for a traced model."""
        summed: Tensor = self.group.all_reduce(x)
        return summed

    def all_reduce_now(self, x: Tensor) -> Tensor:
        """The sum, on the current stream or in the current thread; it may overwrite `x`."""
        summed: Tensor = self.group._all_reduce_out_place(x)  # what vLLM's own operator calls
        return summed

    def quantized_sum_now(self, x: Tensor, format: str) -> Tensor:
        """The sum whose messages travel in `format`, as that of the runtime module: an all-to-all and an all-gather."""
        from rewriter.runtime.quantized.launch import all_reduce_start

        return all_reduce_start(x, self.group.device_group, format, wait=True).wait()

    def begin(self, x: Tensor) -> Any:
        """Begin the sum of a CPU tensor in place, without a thread: an object with `wait`; None where only a thread
        can."""
        from rewriter.runtime.collectives.small_sums import connect_small_sums, small_sum_start

        group = self.group.device_group
        if group is not self.connected:  # all ranks begin their first sum together
            connect_small_sums(group, x.device)
            self.connected = group
        return small_sum_start(x, group)

    def in_pieces(self) -> bool:
        """True where this forward pass runs as captured pieces of a graph, between which no stream may stay open."""
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import get_forward_context, is_forward_context_available

        mode = CUDAGraphMode.PIECEWISE
        return is_forward_context_available() and get_forward_context().cudagraph_runtime_mode == mode


engine: Any = VllmEngine()


def use(another: Any) -> None:
    """Run models on `another` engine, as tests do."""
    global engine
    engine = another
