"""Collectives and layers one by one, on real ranks: values, gradients, dtypes and what may not be done."""

from __future__ import annotations

import pytest
import torch
from ranks import RankError, run_ranks
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from rewriter import RewriterError
from rewriter.runtime import (
    ColumnParallelLinear,
    Conv1D,
    Pending,
    PerRankConv1D,
    PerRankLayerNorm,
    PerRankLinear,
    RowParallelConv1D,
    RowParallelLinear,
    RuntimeModel,
    Shared,
    VocabParallelEmbedding,
    all_gather,
    all_reduce,
    all_reduce_start,
    all_reduce_wait,
    once,
    share,
    shared_gradient,
)
from rewriter.runtime.collectives.gradients import copy_to_group


def each_once(group):
    rank, size = group.rank(), group.size()
    found = {}
    for name, function in {
        "all_reduce": lambda x: all_reduce(x * 1, group),
        "pair": lambda x: all_reduce_wait(all_reduce_start(x * 1, group)),
        "copy_to_group": lambda x: copy_to_group(x, group),
        "once": lambda x: once(x, group),
        "share": lambda x: share(x, group),
        "all_gather": lambda x: all_gather(x, group, -1),
        "shared": lambda x: shared_gradient(x, Shared(2, ((0, 1), (0, 2)) if rank else ((1, 2), (0, 2)), group)),
    }.items():
        x = torch.arange(6.0).reshape(3, 2).add(10 * rank).requires_grad_()
        y = function(x)
        gradient = torch.arange(y.numel()).reshape(y.shape) + (
            100.0 * rank if name in ("copy_to_group", "share", "shared") else 0
        )
        y.backward(gradient)
        found[name] = (y.detach(), x.grad)
    found["size"] = size
    return found


def test_values_and_gradients_of_every_collective():
    x = torch.arange(6.0).reshape(3, 2)
    g = torch.arange(6.0).reshape(3, 2)
    for rank, found in enumerate(run_ranks(each_once, 2)):
        for name in ("all_reduce", "pair"):
            torch.testing.assert_close(found[name], (x + x + 10, g))
        torch.testing.assert_close(found["copy_to_group"], (x + 10 * rank, g + g + 100))
        torch.testing.assert_close(found["once"], (x if rank == 0 else torch.zeros_like(x), g))
        torch.testing.assert_close(found["share"], ((x + 10 * rank) / 2, (g + g + 100) / 2))
        wide = torch.arange(12.0).reshape(3, 4)
        torch.testing.assert_close(found["all_gather"], (torch.cat([x, x + 10], 1), wide[:, 2 * rank : 2 * rank + 2]))
        # Rows held: rank 0 has rows 1, 0, 1 and rank 1 has rows 0, 0, 1 of a parameter of two rows.
        g0, g1 = g, g + 100
        row0, row1 = g0[1] + g1[0] + g1[1], g0[0] + g0[2] + g1[2]
        expected = torch.stack([row1, row0, row1] if rank == 0 else [row0, row0, row1])
        torch.testing.assert_close(found["shared"], (x + 10 * rank, expected))


def dtypes(group):
    sums = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.full((4, 3), 1.5 + group.rank(), dtype=dtype)
        own = x.data_ptr()
        total = all_reduce_wait(all_reduce_start(x, group))
        strided = all_reduce(torch.full((3, 4), 1.0, dtype=dtype).t(), group)
        sums.append((total.dtype, total, total.data_ptr() == own, strided))
    return sums


def test_the_sum_is_in_place_in_every_dtype():
    for sums in run_ranks(dtypes, 2):
        for dtype, (got, total, in_place, strided) in zip(
            (torch.float32, torch.bfloat16, torch.float16), sums, strict=True
        ):
            assert got == dtype
            assert in_place
            torch.testing.assert_close(total, torch.full((4, 3), 4.0, dtype=dtype))
            torch.testing.assert_close(strided, torch.full((4, 3), 2.0, dtype=dtype))


def saved_output(group):
    x = torch.ones(3, requires_grad=True)
    y = all_reduce(x.exp(), group)  # exp keeps its output for backward: overwritten by the sum, it must not be used
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    return True


def test_an_overwritten_saved_tensor_is_an_error_instead_of_a_wrong_gradient():
    assert run_ranks(saved_output, 2) == [True, True]


class Block(nn.Module):
    """Starts one reduction and finishes the one before, as a ladder layer does."""

    def __init__(self, group):
        super().__init__()
        self.linear, self.group = RowParallelLinear(4, 4, bias=True, group=group), group

    def forward(self, x, pending):
        x = x + all_reduce_wait(pending)
        return x, all_reduce_start(self.linear(copy_to_group(x, self.group)), self.group)


def through_modules(group, mode):
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(group) for _ in range(3))
    if mode == "hooks":  # what FSDP2 does: take inputs and outputs apart, and put them together again
        for block in blocks:
            block.register_forward_pre_hook(lambda _, args: pytree.tree_map(lambda t: t.view_as(t), args))
            block.register_forward_hook(lambda _, __, out: pytree.tree_map(lambda t: t.view_as(t), out))
    x = torch.ones(2, 4, requires_grad=True)
    with torch.set_grad_enabled(mode != "no_grad"):
        h, pending = x * 1, Pending(torch.zeros(2, 4))
        for block in blocks:
            if mode == "checkpoint":
                h, pending = checkpoint(block, h, pending, use_reentrant=False)
            else:
                h, pending = block(h, pending)
        out = h + all_reduce_wait(pending)
    if mode == "no_grad":
        assert not out.requires_grad
        return out, None
    out.square().sum().backward()
    return out.detach(), [x.grad, *(p.grad for p in blocks.parameters())]


def hooked(group):
    weight, seen = torch.ones(4, 3, requires_grad=True), []
    total = all_reduce((weight * 2).reshape(2, 2, 3), group)
    total.register_hook(seen.append)
    (total * 5).sum().backward()
    return weight.grad, seen


def test_the_sum_of_a_view_takes_hooks():
    """register_hook crashes on a view whose memory was written to; FSDP2 registers one on what layers return."""
    for gradient, (seen,) in run_ranks(hooked, 2):
        assert torch.equal(gradient, torch.full((4, 3), 10.0))
        assert torch.equal(seen, torch.full((2, 2, 3), 5.0))


@pytest.mark.parametrize("mode", ["plain", "hooks", "checkpoint", "no_grad"])
def test_a_pending_sum_crosses_modules(mode):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(3)]
    x = torch.ones(2, 4, requires_grad=True)
    h, p = x * 1, torch.zeros(2, 4)
    for layer in layers:  # two ranks with equal weights: twice the product, once the bias
        h = h + p
        p = 2 * (h @ layer.weight.T) + layer.bias
    out = h + p
    out.square().sum().backward()
    for got, gradients in run_ranks(through_modules, 2, mode):
        torch.testing.assert_close(got, out.detach())
        if mode == "no_grad":
            continue
        torch.testing.assert_close(gradients[0], x.grad)
        for layer, weight, bias in zip(layers, gradients[1::2], gradients[2::2], strict=True):
            # The reference counted the equal weights of both ranks as one parameter.
            torch.testing.assert_close(weight, layer.weight.grad / 2)
            torch.testing.assert_close(bias, layer.bias.grad)


PER_RANK_LAYERS = {
    "linear": (PerRankLinear, nn.Linear, (6, 4)),
    "conv1d": (PerRankConv1D, Conv1D, (6, 4)),
    "norm": (PerRankLayerNorm, nn.LayerNorm, (6,)),
}


def rank_inputs(ranks):
    return [torch.arange(18.0).reshape(3, 6).add(5 * rank).sin() for rank in range(ranks)]


def per_rank_layers(group, states):
    """Every rank reads a value of its own, and the results are summed."""
    found = {}
    for name, (cls, _, sizes) in PER_RANK_LAYERS.items():
        layer = cls(*sizes, group=group)
        layer.load_state_dict(states[name])
        total = all_reduce(layer(rank_inputs(group.size())[group.rank()]), group)
        total.square().sum().backward()
        found[name] = (total.detach(), {n: p.grad for n, p in layer.named_parameters()})
    return found


def test_whole_layers_whose_input_differs_by_rank_sum_their_gradients():
    layers = {name: plain(*sizes) for name, (_, plain, sizes) in PER_RANK_LAYERS.items()}
    for layer in layers.values():
        for index, p in enumerate(layer.parameters()):
            nn.init.normal_(p, std=0.5, generator=torch.Generator().manual_seed(index))
    results = run_ranks(per_rank_layers, 2, {name: layer.state_dict() for name, layer in layers.items()})
    for name, layer in layers.items():
        total = sum(layer(x) for x in rank_inputs(2))
        total.square().sum().backward()
        for found in results:
            torch.testing.assert_close(found[name][0], total.detach())
            torch.testing.assert_close(found[name][1], {n: p.grad for n, p in layer.named_parameters()})


def partials_with_shared_bias(group, states):
    """Each rank reads its own partial as well as the sum, so every copy of the bias has another local gradient."""
    rank, found = group.rank(), {}
    for cls, dim in ((RowParallelLinear, 1), (RowParallelConv1D, 0)):
        layer = cls(3, 4, group=group, bias_share=True)
        weight = states["weight"] if dim == 1 else states["weight"].t()
        layer.load_state_dict({"weight": weight.narrow(dim, 3 * rank, 3).contiguous(), "bias": states["bias"]})
        partial = layer(rank_inputs(2)[0][:, 3 * rank : 3 * rank + 3])
        own = partial * (rank + 2)
        total = all_reduce(partial, group)
        loss = total.square().sum() + all_reduce(own.square().sum(), group)
        loss.backward()
        found[cls.__name__] = (total.detach(), own.detach(), layer.bias.grad)
    return found


def test_an_equal_share_of_the_bias_on_every_rank():
    states = {"weight": torch.arange(24.0).reshape(4, 6).sin(), "bias": torch.arange(4.0) - 1.5}
    bias = states["bias"].clone().requires_grad_()
    x = rank_inputs(2)[0]
    partials = [x[:, i : i + 3] @ states["weight"][:, i : i + 3].t() + bias / 2 for i in (0, 3)]
    own = [(rank + 2) * partial for rank, partial in enumerate(partials)]
    (sum(partials).square().sum() + sum(o.square().sum() for o in own)).backward()
    for rank, found in enumerate(run_ranks(partials_with_shared_bias, 2, states)):
        for result in found.values():
            torch.testing.assert_close(result, (sum(partials).detach(), own[rank].detach(), bias.grad))


def test_tools_find_the_layers_by_class():
    assert isinstance(ColumnParallelLinear(4, 2), nn.Linear)
    assert isinstance(RowParallelLinear(2, 4), nn.Linear)
    assert isinstance(VocabParallelEmbedding(4, 2), nn.Embedding)
    assert dict(Conv1D(3, 5).named_parameters())["weight"].shape == (3, 5)


def test_a_model_with_dropout_refuses_to_train():
    class WithDropout(RuntimeModel):
        dropout_probability = 0.1

    assert not WithDropout().eval().training
    with pytest.raises(RewriterError, match=r"WithDropout.train\(\): the model has dropout probability 0.1"):
        WithDropout().train()
    assert RuntimeModel().train().training


def fails_on_one(group):
    if group.rank() == 1:
        raise ValueError("the reason")
    all_reduce(torch.ones(1), group)


def test_a_failing_rank_fails_the_test_with_its_traceback():
    with pytest.raises(RankError, match="ValueError: the reason"):
        run_ranks(fails_on_one, 2)
