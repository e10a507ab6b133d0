"""Training where tokens are sharded over ranks: every parameter's gradient is that of one device, and so is the loss,
step after step. Faults that otherwise stay silent fail the same comparison."""

from __future__ import annotations

import functools

import pytest
import runtime_qwen
import runtime_reference as reference
import torch
import torch.nn.functional as F
from ranks import refusal, run_ranks
from sequence_training_ranks import COLUMN, RATE, SQUARE, STEPS, batch, build, pair_model
from zero_stage_model import gradient_of

from rewriter.ir.ops import SequencePlan

LADDER_FROM = runtime_qwen.LADDER_FROM
GRADIENT, LOSS = 1e-5, 1e-4  # relative to the largest entry of a parameter's gradient; to the loss


@functools.cache
def one_device():
    """In fp64: the gradients of the first step, and the losses of STEPS steps of gradient descent."""
    weights = {name: w.double().requires_grad_() for name, w in reference.weights().items()}
    optimizer = torch.optim.SGD(weights.values(), lr=RATE)
    ids, labels = batch()
    losses, first = [], {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = reference.logits(weights, ids, LADDER_FROM)
        # transformers' loss: position t is asked for label t + 1
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        first = first or {name: w.grad.clone() for name, w in weights.items()}
        optimizer.step()
        losses.append(loss.item())
    return first, losses


# --- on a rank ---


def trained(group, cases):
    """Per case the gradients of the first step, the losses, and with ZeRO the gradients' norm. A case: arguments of
    `build`, "fsdp" or the stage of ZeRO or None, the number of steps, and a fault's name."""
    return [one_case(*case) for case in cases]


def one_case(layout, sharding, steps, fault):
    from torch.distributed.tensor import DTensor

    from rewriter.training import shard_optimizer, shard_parameters

    model, ids, labels = build(*layout)
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            FAULTS[fault](patch.setattr)
        if sharding == "fsdp":
            shard_parameters(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        if sharding in (1, 2):
            model(ids, labels=labels)  # which gives parameters hooks that sum gradients: not to be summed twice
            optimizer = shard_optimizer(model, lambda groups: torch.optim.SGD(groups, lr=RATE), stage=sharding)
        losses, first, norm = [], {}, None
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(ids, labels=labels).loss
            loss.backward()
            if sharding in (1, 2) and not first:
                first, norm = put_together(model, optimizer), clipped(model, optimizer)
            gradients = {name: p.grad for name, p in model.named_parameters()}
            if not first:
                first = {n: g.full_tensor() if isinstance(g, DTensor) else g.clone() for n, g in gradients.items()}
            optimizer.step()
            losses.append(loss.item())
    return first, losses, norm


def put_together(model, optimizer):
    """Gradients from the ranks that own their parts."""
    found = {}
    for name, p in model.named_parameters():
        part = gradient_of(optimizer, p)
        found[name] = torch.zeros_like(p) if part is None else part
        torch.distributed.all_reduce(found[name], group=optimizer.group)
    return found


def clipped(model, optimizer):
    """The norm of the gradients of all tensor-parallel ranks, too."""
    tp = 1 if model.tp is None else model.tp.size()
    whole = {p: reference.weights()[n].shape == p.shape for n, p in model.named_parameters()}
    return optimizer.clip_grad_norm_(float("inf"), within=model.tp, share=lambda p: 1 / tp if whole[p] else 1.0)


# --- faults, each one line of what users' own training loops get wrong ---


def reduced_in_bf16(patch):
    from rewriter.runtime import replicas as gradient_sums
    from rewriter.training import sharding

    policy, summed = sharding.MixedPrecisionPolicy, gradient_sums._summed
    patch(sharding, "MixedPrecisionPolicy", lambda **k: policy(**(k | {"reduce_dtype": torch.bfloat16})))
    patch(gradient_sums, "_summed", lambda *a: lambda gradient: summed(*a)(gradient.bfloat16()).float())


def shifted_within_the_shard(patch):
    from rewriter.runtime import module

    shard, shift = module.shard_tokens, module.next_tokens
    patch(module, "next_tokens", lambda labels: labels)
    patch(module, "shard_tokens", lambda x, ctx, fill: shift(shard(x, ctx, fill)))


def averaged_over_the_sequence(patch):
    from torch.distributed.fsdp import FSDPModule

    from rewriter.runtime import replicas as gradient_sums

    divide, summed = FSDPModule.set_gradient_divide_factor, gradient_sums._summed
    patch(FSDPModule, "set_gradient_divide_factor", lambda self, _: divide(self, torch.distributed.get_world_size()))
    patch(gradient_sums, "_summed", lambda group, _: summed(group, group.size()))


def not_summed(patch):
    from rewriter.runtime import module

    patch(module, "sum_gradients", lambda model: None)


def multiplied_by_the_reduction_of_the_loss(patch):
    from rewriter.runtime import module

    loss = module.global_loss

    def multiplied(logits, targets, replicas):
        found = loss(logits, targets, replicas)
        found.register_hook(lambda gradient: gradient * replicas.group.size())
        return found

    patch(module, "global_loss", multiplied)


def positions_within_the_shard(patch):
    from rewriter.runtime import RuntimeModel

    patch(RuntimeModel, "_positions", lambda self, ids, ctx: torch.arange(ids.shape[1])[None] // self.sequence.ranks)


FAULTS = {
    fault.__name__: fault
    for fault in (
        reduced_in_bf16,
        shifted_within_the_shard,
        averaged_over_the_sequence,
        not_summed,
        multiplied_by_the_reduction_of_the_loss,
        positions_within_the_shard,
    )
}


# --- the comparison ---


def check(by_rank, tp=1):
    """Gradients and losses of all ranks (tensor-parallel ranks are neighbours) are those of one device."""
    gradients, losses = one_device()
    expected_norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
    for rank, (found, followed, norm) in enumerate(by_rank):
        assert norm is None or float(norm) == pytest.approx(expected_norm, rel=GRADIENT)
        for name, whole in gradients.items():
            expected = reference.shard(name, whole, rank % tp, tp)
            error = float((found[name] - expected).abs().max() / whole.abs().max())
            assert error <= GRADIENT, f"{name} on rank {rank}: {error:.1e}"
        for step, (loss, wanted) in enumerate(zip(followed, losses, strict=False)):
            assert abs(loss - wanted) <= LOSS * wanted, f"step {step} on rank {rank}: {loss} instead of {wanted}"


REPLICATED = [((COLUMN, 2), "fsdp", STEPS, None)] + [
    ((COLUMN, 2), "fsdp", 1, fault) for fault in FAULTS if fault != "not_summed"
]
PLAIN = [((SQUARE,), None, STEPS, None)] + [((SQUARE,), None, 1, fault) for fault in FAULTS]
ALONE = SequencePlan("attention2d", (1, 1, 1))
ZERO = {"sequence": ((COLUMN, 2), 2, STEPS, None), "tensor": ((ALONE, 2, 2), 1, STEPS, None)}


@functools.cache
def of_four(which):
    return run_ranks(trained, 4, {"replicated": [*REPLICATED, *ZERO.values()], "plain": PLAIN}[which])


@pytest.mark.slow
def test_sequence_and_data_parallel_training_with_fsdp_follows_one_device():
    check([rank[0] for rank in of_four("replicated")])


@pytest.mark.parametrize("parallel", ZERO)
def test_training_with_a_sharded_optimizer_follows_one_device(parallel):
    """ZeRO 2 over replicas and sequence ranks, ZeRO 1 over the replicas of each tensor-parallel rank."""
    index = len(REPLICATED) + list(ZERO).index(parallel)
    check([rank[index] for rank in of_four("replicated")], tp=2 if parallel == "tensor" else 1)


@pytest.mark.slow
def test_sequence_parallel_training_without_fsdp_follows_one_device():
    check([rank[0] for rank in of_four("plain")])


@pytest.mark.parametrize(
    ("which", "fault"),
    [
        *(("replicated", case[-1]) for case in REPLICATED[1:]),
        *(pytest.param("plain", case[-1], marks=pytest.mark.slow) for case in PLAIN[1:]),
    ],
)
def test_a_fault_is_found_by_the_same_comparison(which, fault):
    index = [case[-1] for case in {"replicated": REPLICATED, "plain": PLAIN}[which]].index(fault)
    with pytest.raises(AssertionError):
        check([rank[index] for rank in of_four(which)])


# --- what else a training loop does: on two ranks, one after the other, against the same module on one device ---


def accumulated(model, ids, labels):
    """Two backward passes before a step."""
    for rows in (slice(0, 1), slice(1, 4)):
        (model(ids[rows], labels=labels[rows]).loss / 2).backward()


def tied(model, ids, labels):
    """One parameter, used twice."""
    model.lm_head.weight = model.model.embed_tokens.weight
    model(ids, labels=labels).loss.backward()


def partly_frozen(model, ids, labels):
    """Frozen before the first call, and thawed after it."""
    for name in ("norm", "embed_tokens"):
        model.model.get_submodule(name).requires_grad_(False)
    model(ids, labels=labels).loss.backward()
    model.model.norm.requires_grad_(True)
    model(ids, labels=labels).loss.backward()


def on_whole_logits(model, ids, labels):
    """A loss of one's own, on what forward gathers."""
    logits = model(ids)
    F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()).backward()


def targets_on_one_rank(model, ids, labels):
    """The other rank has none."""
    labels = labels.clone()
    labels[:, 0::2] = -100
    model(ids, labels=labels).loss.backward()


def no_targets(model, ids, labels):
    loss = model(ids, labels=torch.full_like(labels, -100)).loss
    assert loss == 0, loss
    loss.backward()


def own_positions(model, ids, labels):
    places = torch.arange(ids.shape[1]).expand_as(ids) * 2 + 5
    model(ids, places, labels=labels).loss.backward()


def packed(model, ids, labels):
    from rewriter.runtime import Context

    segments = (torch.arange(ids.shape[1]) // torch.tensor([[9], [12], [40], [20]])).contiguous()
    model(ids, ctx=Context(segment_ids=segments), labels=labels).loss.backward()


def left_padded(model, ids, labels):
    from rewriter.runtime import Context

    padding = torch.tensor([0, 3, 20, 36])
    labels = labels.masked_fill(torch.arange(ids.shape[1]) <= padding[:, None], -100)
    model(ids, ctx=Context(first_valid=padding), labels=labels).loss.backward()


LOOPS = {
    loop.__name__: loop
    for loop in (
        accumulated,
        tied,
        partly_frozen,
        on_whole_logits,
        targets_on_one_rank,
        no_targets,
        own_positions,
        packed,
        left_padded,
    )
}


def looped(loop, on_ranks):
    model = pair_model(on_ranks)
    LOOPS[loop](model, *batch())
    return {name: p.grad for name, p in model.named_parameters()}


def on_a_pair(group):
    """Gradients by loop; what is said about a loss on the last logits, and about fully_shard itself."""
    from torch.distributed.fsdp import fully_shard

    results = {loop: looped(loop, True) for loop in LOOPS}
    model = pair_model(True)
    messages = [refusal(lambda: model(batch()[0], logits_to_keep=5).square().mean().backward())]
    fully_shard(model, mesh=model.replicas.mesh)
    return results, [*messages, refusal(lambda: model(batch()[0]))]


@functools.cache
def of_a_pair():
    return run_ranks(on_a_pair, 2)


@pytest.mark.parametrize("loop", LOOPS)
def test_gradients_are_those_of_one_device_in_every_kind_of_loop(loop):
    expected = looped(loop, False)
    for found, _ in of_a_pair():
        assert found[loop].keys() == expected.keys()
        for name, gradient in expected.items():
            if gradient is None:
                assert found[loop][name] is None, name
            else:
                torch.testing.assert_close(found[loop][name], gradient, rtol=0, atol=2e-5 * float(gradient.abs().max()))


def test_what_would_scale_gradients_silently_is_refused():
    for _, (last, sharded) in of_a_pair():
        assert "the head's gradient would be counted once per rank" in last
        assert "would average gradients over 2 sequence ranks" in sharded
        assert "shard_parameters" in sharded


def sum_of_bf16(group):
    from rewriter.runtime.replicas import _summed

    large = torch.arange(64) % group.size() == group.rank()
    return _summed(group, 1)(torch.where(large, 256.0, 0.6).bfloat16())


def test_gradients_in_bf16_are_summed_in_fp32():
    """In bf16, 256 + 0.6 is 256 again: each rank has the 256 of some, so that no order of sums spares all."""
    for total in run_ranks(sum_of_bf16, 4):
        assert torch.equal(total, torch.full((64,), 258.0).bfloat16())
