"""Sums of the vLLM plugin that travel quantized, on real ranks, against their meaning in one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from rewriter.ir.simulate import quantized_sum
from rewriter.output.sum_schedule import Wire
from rewriter.runtime.serving.vllm import engine, sums

TOKENS, WIDTH = 5, 96


class GlooEngine(engine.VllmEngine):
    """vLLM's group, which is gloo's on a CPU."""

    @property
    def group(self):
        def all_reduce(x):
            whole = x.clone()
            dist.all_reduce(whole)
            return whole

        given = {"all_reduce": all_reduce, "_all_reduce_out_place": all_reduce}
        return SimpleNamespace(device_group=dist.group.WORLD, world_size=dist.get_world_size(), **given)

    def in_pieces(self):
        return False


def parts(ranks, dtype):
    torch.manual_seed(3)
    return [torch.randn(2, TOKENS, WIDTH).to(dtype) for _ in range(ranks)]


def summed(group, dtype, wire):
    """Two tensors: each waited for at once, and both overlapping as in a ladder."""
    engine.use(GlooEngine())
    one, two = parts(dist.get_world_size(), dtype)[dist.get_rank()]
    with torch.inference_mode():
        now = sums.total(one, wire), sums.total(two, wire)
        token, _ = sums.begin(one, one, wire)
        first, token = sums.step(two, token, wire)
        return [*now, first, sums.finish(token, two)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", ["int8", "fp8@64", "int4-hadamard@32"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_quantized_sums_are_those_of_the_meaning(ranks, format, dtype):
    one, two = ([part[i] for part in parts(ranks, dtype)] for i in (0, 1))
    wanted = [quantized_sum(given, format) for given in (one, two)]
    found = run_ranks(summed, ranks, dtype, Wire(format, one[0].nbytes))
    for rank in found:
        for given, meant in zip(rank, wanted * 2, strict=True):
            assert torch.equal(given, meant)
    assert not torch.equal(wanted[0], sum(one[1:], one[0]))


def test_short_messages_travel_exact():
    given = [part[0] for part in parts(2, torch.float32)]
    found = run_ranks(summed, 2, torch.float32, Wire("int8", given[0].nbytes + 1))
    for rank in found:
        assert torch.equal(rank[0], given[0] + given[1])
        assert torch.equal(rank[2], given[0] + given[1])
