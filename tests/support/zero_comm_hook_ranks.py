"""Cases of the comm hooks of ZeRO++, as each rank runs them, with the faults that tests seed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from zero_model import LOCAL, RANKS, backward, batches, flat_mesh, model, sharded

from rewriter.kernels import dequantize, quantize
from rewriter.training import zero_plus_plus
from rewriter.training.zero import plus_plus
from rewriter.training.zero.plus_plus import DefaultAllGather, QuantizedAllGather

HOOKS = {
    "qwz": {"weights": "int8", "node": LOCAL},
    "hpz": {"secondary": LOCAL},
    "qgz": {"gradients": "int8/int4-hadamard", "node": LOCAL},
    "qwz+hpz": {"weights": "int8", "secondary": LOCAL},
    "all": {"weights": "int8", "gradients": "int8/int4-hadamard", "secondary": LOCAL},
    "qgz-8": {"gradients": "int8", "node": LOCAL},
    "one-node": {"gradients": "int8", "weights": "int8", "node": RANKS},
    "nodes-of-one": {"gradients": "int8", "weights": "int8", "node": 1},
    "kept-whole": {"weights": "int8", "node": LOCAL, "secondary": 1},
}
# name: arguments of the comm hooks, mixed precision, how gradients accumulate, divide factor, sum instead of mean
CASES = {
    **{name: (name, {}, "once", None, False) for name in HOOKS},
    "all twice": ("all", {}, "twice", None, False),
    "all unsynced": ("all", {}, "unsynced", None, False),
    "qgz-8 partly": ("qgz-8", {}, "partly", None, False),
    "qgz-8 factor": ("qgz-8", {}, "once", 3.0, False),  # which gloo's own reduce-scatter cannot
    "qgz-8 factor sum": ("qgz-8", {}, "once", 3.0, True),
    "all bf16": ("all", {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, "once", None, False),
    "qgz-8 fp16": ("qgz-8", {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float16}, "once", None, False),
}
SLOW = {"qwz+hpz", "qgz-8", "one-node", "nodes-of-one", "kept-whole", "qgz-8 factor", "qgz-8 fp16"}


def gradients(made):
    """This rank's shards."""
    return {name: p.grad.to_local().float() for name, p in made.named_parameters() if p.grad is not None}


def computed_with(made):
    """A dict that will hold every parameter as its module computes with it in forward, unsharded."""
    full = {}

    def look(path, names):
        def hook(module, _):
            full.update({f"{path}.{n}".lstrip("."): getattr(module, n).detach().float().clone() for n in names})

        return hook

    for path, module in made.named_modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if names:
            module.register_forward_pre_hook(look(path, names))
    return full


def first_layer_weights(made):
    """What the first layer will compute with, in forward and in backward, unsharded."""
    seen = {"forward": [], "backward": []}
    layer = made.llama.model.layers[0].self_attn.q_proj

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            seen["backward"].append(layer.weight.detach().clone())
            return gradient

    layer.register_forward_hook(lambda module, args, out: Look.apply(out))
    layer.register_forward_pre_hook(lambda m, args: seen["forward"].append(m.weight.detach().clone()))
    return seen


def comm_hook_case(group, expected, hooks, policy, accumulate, factor, force_sum, fault=None):
    """Gradients with the comm hooks; those of FSDP2 that computes with the same weights; weights that this rank saw;
    whether its own shards are as before. `expected` holds what FSDP2 gave by weights, precision and accumulation."""
    ids = batches(group)
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            fault(patch.setattr)
        made = sharded(model(), **policy)
        zero_plus_plus(made, **HOOKS[hooks])
        for module in made.modules():
            if factor is not None and hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(factor)
            if force_sum and hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)
        seen = first_layer_weights(made)
        full = computed_with(made)
        backward(made, ids, accumulate)
        found = gradients(made)
        after = {name: p.to_local() for name, p in made.named_parameters()}
    kept = all(torch.equal(p.to_local(), after[name]) for name, p in sharded(model()).named_parameters())
    reference = HOOKS[hooks].get("weights"), tuple(sorted(policy.items(), key=str)), accumulate
    if reference not in expected:
        plain = model()
        plain.load_state_dict(full, strict=False)  # lm_head.weight is that of the embedding
        plain = sharded(plain, **({**policy, "reduce_dtype": torch.float32} if policy else {}))
        backward(plain, ids, accumulate)
        expected[reference] = gradients(plain)
    scale = 1.0 if factor is None else RANKS / factor
    return found, {name: g * scale for name, g in expected[reference].items()}, seen, kept


def multiplied_by_the_world(patch):
    patch(plus_plus, "reduction_factor", lambda op, ranks: 1.0)


def multiplied_by_the_node(patch):
    """As DeepSpeed's: the sum inside a node is never divided."""
    factor = plus_plus.reduction_factor
    patch(plus_plus, "reduction_factor", lambda op, ranks: factor(op, ranks) * LOCAL)


def blocks_across_parameters(patch):
    layout = plus_plus.BlockLayout
    patch(plus_plus, "BlockLayout", lambda sizes, block: layout([sum(sizes)], block))


def own_shard_exact(patch):
    gather = QuantizedAllGather.__call__

    def faulty(self, output_tensor, input_tensor, group, async_op=False):
        own = input_tensor.clone()
        result = gather(self, output_tensor, input_tensor, group, async_op)
        input_tensor.copy_(own)
        return result

    patch(QuantizedAllGather, "__call__", faulty)


def secondary_quantized(patch):
    class Rounded(DefaultAllGather):
        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            again = dequantize(quantize(input_tensor, "int4"), "int4", input_tensor.shape, input_tensor.dtype)
            return super().__call__(output_tensor, input_tensor.copy_(again), group, async_op)

    init = QuantizedAllGather.__init__

    def faulty(self, *args):
        init(self, *args)
        self._exact = Rounded()

    patch(QuantizedAllGather, "__init__", faulty)


FAULTS = {  # and the cases that they spoil
    multiplied_by_the_world: "qgz-8",
    multiplied_by_the_node: "qgz-8",
    blocks_across_parameters: "qgz-8",
    own_shard_exact: "qwz",
    secondary_quantized: "qwz+hpz",
}


def comm_hook_cases(group, slow):
    expected = {}
    found = {name: comm_hook_case(group, expected, *case) for name, case in CASES.items() if (name in SLOW) == slow}
    if not slow:
        for fault, name in FAULTS.items():
            found[fault.__name__] = comm_hook_case(group, expected, *CASES[name], fault)
        found |= {"replicas": replicas(), "stepped": {n: stepped_after(*p) for n, p in STEPPED.items()}}
    return found


STEPPED = {  # comm hooks, and whether the optimizer is of `foreach`, which leaves versions of tensors as they are
    "hpz": ({"secondary": LOCAL}, False),
    "hpz foreach": ({"secondary": LOCAL}, True),
    "kept whole": ({"secondary": 1}, False),
    "qwz+hpz": ({"weights": "int8", "secondary": LOCAL}, True),
}


def stepped_after(hooks, foreach):
    """What is computed after a step that a forward pass without gradients came before, and what it should be."""

    def run(hooks):
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        for module in (made[0], made[2], made):
            fully_shard(module, mesh=flat_mesh(), reshard_after_forward=True)
        if hooks:
            zero_plus_plus(made, **hooks)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.02, foreach=foreach)
        x = torch.linspace(-1, 1, 64).view(2, 32)
        made(x).square().sum().backward()
        with torch.no_grad():
            before = made(x)
        optimizer.step()
        return before, made(x).detach()

    return run(hooks), run(None)


def replicas():
    """Sums inside this rank's replica, of batches that both replicas have: their rounding errors are averaged after."""
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(0)
    made, plain = (fully_shard(nn.Linear(64, 64, bias=False), mesh=mesh) for _ in range(2))
    plain.load_state_dict(made.state_dict())
    zero_plus_plus(made, gradients="int8", node=RANKS // 2)
    generator = torch.Generator().manual_seed(mesh.get_local_rank("shard"))
    x, sums, reduce_scatter = torch.randn(16, 64, generator=generator), [], plus_plus.reduce_scatter

    def kept(*arguments, **options):
        sums.append(reduce_scatter(*arguments, **options).clone())
        return sums[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plus_plus, "reduce_scatter", kept)
        made(x).square().mean().backward()
    plain(x).square().mean().backward()
    return sums[0], made.weight.grad.to_local(), plain.weight.grad.to_local()
