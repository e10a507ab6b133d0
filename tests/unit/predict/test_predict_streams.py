"""Models of several residual streams: their mixing is computation, and messages are of one hidden state."""

from __future__ import annotations

import pytest
from programs import OVERLAP, tensor_parallel

from rewriter.check.coverage.configs import small_config
from rewriter.ir.communication import collectives
from rewriter.predict.forward import Runner
from rewriter.predict.kernel_cost import Kernel
from rewriter.predict.workload import ForwardPass
from rewriter.tracing import trace


def hyper(streams):
    """A small HY V4 of that many streams."""
    config = small_config("hy_v4")
    config.num_hidden_layers, config.hc_mult = 3, streams
    config.indexer_types, config.mlp_layer_types = ["full", "shared", "full"], ["dense", "sparse", "sparse"]
    config.layer_types = config.layer_types[:3]
    return trace(config)


def messages_and_work(streams):
    """(bytes per token of every message of a ladder on two ranks, bytes that its kernels move)."""
    sharded = tensor_parallel(hyper(streams), 2, ("ladder", {}), OVERLAP)
    works = Runner().run(sharded, ForwardPass(batch=1, tokens=64)).works
    kernels = [item for work in works for item in work.items if isinstance(item, Kernel)]
    return [c.bytes_per_token for c in collectives(sharded)], sum(kernel.nbytes for kernel in kernels)


@pytest.mark.slow
def test_bytes_are_those_of_one_hidden_state_and_mixing_takes_time():
    (one, before), (four, after) = map(messages_and_work, (1, 4))
    assert one == four != []
    assert after > before


@pytest.mark.slow
def test_the_mixture_is_computed_while_the_sum_travels():
    """K(X) and the coefficients lie between the beginning of a sum and its wait, where overlap puts them."""
    sharded = tensor_parallel(trace(small_config("deepseek_v4")), 2, OVERLAP)
    works = Runner().run(sharded, ForwardPass(batch=1, tokens=64)).works
    travelling, hidden = 0, 0
    for work in works:
        target = getattr(work.node.target, "__name__", "")
        travelling += (target == "all_reduce_start") - (target == "all_reduce_wait")
        hidden += sum(kernel.nbytes for kernel in work.items) if travelling else 0
    streams = 4 * 64 * 64 * 2  # bytes of four streams of 64 tokens of 64 channels in bf16
    layers = sharded.source.num_layers
    assert hidden >= 2 * layers * streams  # each block reads its streams to mix them at least
