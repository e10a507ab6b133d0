"""The comm hooks of ZeRO++ on FSDP2, alone and together: four ranks as two nodes of two, against FSDP2 without them.

Gradients are compared parameter by parameter, so that a wrong scale of one shape fails; weights that ranks compute
with, bit by bit. Faults that must not stay silent are seeded.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from zero_model import LOCAL, RANKS, backward, batches, flat_mesh, marked, model, sharded

from rewriter.kernels import dequantize, quantize
from rewriter.training import zero_plus_plus
from rewriter.training.zero import comm_hooks
from rewriter.training.zero.comm_hooks import DefaultAllGather, QuantizedAllGather

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
CASES = {name: (name, {}, "once", None, False) for name in HOOKS}
CASES |= {
    "all twice": ("all", {}, "twice", None, False),
    "all unsynced": ("all", {}, "unsynced", None, False),
    "qgz-8 partly": ("qgz-8", {}, "partly", None, False),
    "qgz-8 factor": ("qgz-8", {}, "once", 3.0, False),  # which gloo's own reduce-scatter cannot
    "qgz-8 factor sum": ("qgz-8", {}, "once", 3.0, True),
    "all bf16": ("all", {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, "once", None, False),
    "qgz-8 fp16": ("qgz-8", {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float16}, "once", None, False),
}


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


# --- seeded faults ---


def multiplied_by_the_world(patch):
    patch(comm_hooks, "reduction_factor", lambda op, ranks: 1.0)


def multiplied_by_the_node(patch):
    """As DeepSpeed's: the sum inside a node is never divided."""
    factor = comm_hooks.reduction_factor
    patch(comm_hooks, "reduction_factor", lambda op, ranks: factor(op, ranks) * LOCAL)


def blocks_across_parameters(patch):
    layout = comm_hooks.BlockLayout
    patch(comm_hooks, "BlockLayout", lambda sizes, block: layout([sum(sizes)], block))


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
SLOW = {"qwz+hpz", "qgz-8", "one-node", "nodes-of-one", "kept-whole", "qgz-8 factor", "qgz-8 fp16"}


def comm_hook_cases(group, slow):
    expected = {}
    found = {name: comm_hook_case(group, expected, *case) for name, case in CASES.items() if (name in SLOW) == slow}
    if not slow:
        for fault, name in FAULTS.items():
            found[fault.__name__] = comm_hook_case(group, expected, *CASES[name], fault)
        found |= {"replicas": replicas(), "stepped": {n: stepped_after(*p) for n, p in STEPPED.items()}}
        found["reports"] = reports()
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
    x, sums, start = torch.randn(16, 64, generator=generator), [], comm_hooks.reduce_scatter_start

    class Kept:
        def __init__(self, pending):
            self.pending = pending

        def wait(self):
            sums.append(self.pending.wait().clone())
            return sums[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm_hooks, "reduce_scatter_start", lambda *a, **k: Kept(start(*a, **k)))
        made(x).square().mean().backward()
    plain(x).square().mean().backward()
    return sums[0], made.weight.grad.to_local(), plain.weight.grad.to_local()


@functools.cache
def results_of(slow):
    return run_ranks(comm_hook_cases, RANKS, slow)


# relative L2 error of a parameter's gradient by what is quantized
EXACT = 1e-5


def limit(case):
    hooks, policy = CASES[case][:2]
    formats = HOOKS[hooks].get("gradients")
    if formats is None:
        return 2e-2 if policy else EXACT
    return 0.15 if "int4" in formats else 0.02


def check_gradients(case, results, key=None):
    """Shards of all ranks together, parameter by parameter."""
    ranks = [rank[key or case] for rank in results]
    assert ranks[0][0].keys() == ranks[0][1].keys()
    for name in ranks[0][1]:
        found, gradient = (torch.cat([rank[which][name].flatten() for rank in ranks]) for which in (0, 1))
        size = float(gradient.norm())
        assert size > 0, name
        error = float((found - gradient).norm()) / size
        assert error <= limit(case), f"{name} of {len(gradient)}: error {error:.1e}"
        scale = float((found * gradient).sum() / gradient.square().sum())
        assert abs(scale - 1) <= limit(case), f"{name} of {len(gradient)}: scale {scale:.3f}"


def check_weights(case, results, key=None):
    """All ranks compute with equal bits, in forward and in backward, and none has changed what the optimizer steps."""
    first = results[0][key or case][2]["forward"][0]
    for _, _, seen, kept in (rank[key or case] for rank in results):
        assert len(seen["forward"]) == len(seen["backward"]) > 0
        for weight in itertools.chain(*seen.values()):
            assert torch.equal(weight, first)
        assert kept


@pytest.mark.parametrize("case", marked(CASES, SLOW))
def test_gradients_are_those_of_fsdp2_with_the_same_weights(case):
    check_gradients(case, results_of(case in SLOW))


@pytest.mark.parametrize("case", marked(CASES, SLOW))
def test_ranks_compute_with_equal_weights_in_forward_and_backward(case):
    check_weights(case, results_of(case in SLOW))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_by_the_same_comparisons(fault):
    check = check_weights if fault in (own_shard_exact, secondary_quantized) else check_gradients
    with pytest.raises(AssertionError):
        check(FAULTS[fault], results_of(False), fault.__name__)


def test_replicas_round_differently_so_that_their_errors_average_out():
    ranks = [rank["replicas"] for rank in results_of(False)]
    for first, second in ((0, 2), (1, 3)):
        exact, error = (ranks[first][0] - ranks[second][0]).abs() > 0, []
        assert exact.float().mean() > 0.5
        for rank in (first, second):
            _, found, expected = ranks[rank]
            error.append(float((found - expected).norm() / expected.norm()))
        assert max(error) < 0.02, error


@pytest.mark.parametrize("hooks", STEPPED)
def test_a_step_after_a_forward_pass_without_gradients_is_seen(hooks):
    for rank in results_of(False):
        (before, found), (_, expected) = rank["stepped"][hooks]
        error, moved = ((found - other).norm() / expected.norm() for other in (expected, before))
        assert error < (0.02 if "qwz" in hooks else 1e-6)
        assert moved > 0.1, moved


def reports():
    """Of memory, where the root stays gathered and where not, with their parameters. LOCAL_WORLD_SIZE gives nodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        policy = {"param_dtype": torch.bfloat16}
        kept = zero_plus_plus(sharded(model(), reshard=None, **policy), weights="int8", secondary=2)
        freed = zero_plus_plus(sharded(model(), **policy), weights="int8", secondary=2)
    held = sum(p.numel() for layer in model().llama.model.layers for p in layer.parameters())
    return kept, freed, held, sum(p.numel() for p in model().parameters())


def test_memory_of_the_secondary_partition_is_reported():
    for kept, freed, held, parameters in (rank["reports"] for rank in results_of(False)):
        assert (freed.ranks, freed.node, freed.secondary, freed.parameters) == (RANKS, 2, 2, parameters)
        # bf16 over 2 ranks, padded to 4: at most 3 rows of each parameter
        assert parameters * 2 / 2 <= freed.secondary_bytes <= 1.2 * parameters * 2 / 2
        assert held * 2 / 2 <= kept.secondary_bytes <= 1.2 * held * 2 / 2
        assert (parameters - held) * 2 <= kept.kept_bytes <= 1.2 * (parameters - held) * 2
        assert freed.kept_bytes == 0
        assert parameters * 4 / 4 <= freed.primary_bytes <= 1.2 * parameters
