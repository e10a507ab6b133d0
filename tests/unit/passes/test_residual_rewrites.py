"""What desync, parallel_block and the own-partial ladder do to the wiring, alone and side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import zoo
from programs import PASSES, tensor_parallel, traced, weights
from transformers import AutoConfig

from rewriter.check.comparison import relative_error
from rewriter.check.coverage.configs import small_config
from rewriter.check.random_model import random_ids, random_model
from rewriter.check.reference_modes import original_logits, reference_of
from rewriter.common.errors import RewriterError
from rewriter.ir import ops
from rewriter.ir.marks import marks
from rewriter.ir.residual import residual_blocks
from rewriter.ir.simulate import simulate
from rewriter.passes.base import bound_ranks
from rewriter.passes.desync import Desync
from rewriter.passes.ladder import Ladder
from rewriter.passes.parallel_block import ParallelBlock
from rewriter.passes.phases import single_device
from rewriter.recipes.apply import lint
from rewriter.tracing import trace


def sharded(name="llama", tp=2):
    return tensor_parallel(traced(name), tp)


def apply(program, *rewrites):
    for name, options in rewrites:
        program = PASSES[name](**options).apply(program)
        lint(program, name)
    return program


def reductions(program):
    return sum(n.target is ops.all_reduce and marks(n).layer is not None for n in program.graph.nodes)


def modes(program):
    return [(b.layer, b.kind, b.reads, b.mode.name) for b in residual_blocks(program)]


def logits(program, name="llama", extra=None):
    ids = zoo.batch(2, 21, zoo.shared(name).config.vocab_size)
    return simulate(program, ids, weights=weights(name) | (extra or {}))


@pytest.mark.parametrize(("n", "left"), [(2, 4), (3, 3), (4, 2), (8, 1), (100, 1)])
@pytest.mark.parametrize("resync", ["mean", "sum"])
def test_desync_keeps_every_nth_reduction_and_the_last(n, left, resync):
    assert reductions(apply(sharded(), ("desync", {"n": n, "resync": resync}))) == left


def test_a_pattern_is_repeated_over_the_selected_layers():
    by_pattern = apply(sharded(), ("desync", {"pattern": (("drop", "drop"), ("drop", "keep"))}))
    assert by_pattern.text() == apply(sharded(), ("desync", {"n": 4})).text().replace(
        "n=4, pattern=None", "n=None, pattern=(('drop', 'drop'), ('drop', 'keep'))"
    )


def test_the_last_reduction_of_each_run_is_kept():
    program = apply(sharded(), ("desync", {"layers": [0, 2], "pattern": (("drop", "drop"),)}))
    assert reductions(program) == 2 + 2 + 2  # two standard layers, and one reduction of each desynced one


def test_modes_mix_freely_and_transitions_are_those_of_the_semantics():
    program = apply(
        sharded("qwen3"),
        ("parallel_block", {"layers": [0]}),
        ("ladder", {"layers": [1]}),
        ("desync", {"layers": [2], "n": 2}),
        ("ladder", {"layers": [3], "variant": "own_partial"}),
        ("ladder", {"layers": [4]}),
    )
    assert modes(program) == [
        (0, "parallel", (0,), "parallel"),
        (1, "attention", (0,), "ladder"),  # after a parallel layer: that layer's input
        (1, "mlp", (1,), "ladder"),
        (2, "attention", (3,), "desync"),  # drained
        (2, "mlp", (4,), "desync"),
        (3, "attention", (5,), "own_partial"),  # synchronised and drained
        (3, "mlp", (5,), "own_partial"),
        (4, "attention", (7,), "ladder"),  # after another variant: drained
        (4, "mlp", (7,), "ladder"),
    ]


def test_the_order_of_the_passes_does_not_matter():
    steps = [
        ("ladder", {"layers": [1]}),
        ("parallel_block", {"layers": [0]}),
        ("desync", {"layers": [3], "n": 2}),
        ("ladder", {"layers": [2], "variant": "own_partial"}),
    ]
    one, other = apply(sharded(), *steps), apply(sharded(), *reversed(steps))
    assert modes(one) == modes(other)
    with torch.no_grad():
        assert torch.equal(logits(one), logits(other))


def test_without_anything_to_disagree_on_a_sum_is_exact():
    """Dropping the reduction of a block whose partials are read by nobody in between changes nothing."""
    program = apply(sharded(), ("parallel_block", {"norm": "own"}))
    graph, _ = program.edit()
    with torch.no_grad():
        expected = logits(program)
        merged = PASSES["merge_reductions"]().apply(program.with_(graph=graph))
        torch.testing.assert_close(logits(merged), expected, rtol=1e-5, atol=1e-4)
    assert reductions(merged) == 4


def test_untied_norms_start_as_copies_and_have_gradients_of_their_own():
    tied, untied = (apply(sharded(), ("desync", {"n": 2, "untie_norms": flag})) for flag in (False, True))
    name = "model.layers.1.post_attention_layernorm.weight"
    assert untied.parameters[name].full_shape == (128,)
    assert untied.parameters["model.layers.1.input_layernorm.weight"].ranges is None
    copies = {
        n: weights("llama")[n].repeat(2)
        for n, p in untied.parameters.items()
        if n.endswith("layernorm.weight") and p.ranges
    }
    assert len(copies) == 4
    leaf = copies[name].clone().requires_grad_()
    result = logits(untied, extra=copies | {name: leaf})
    assert torch.equal(result, logits(tied))
    result.square().mean().backward()
    first, second = leaf.grad.chunk(2)
    assert not torch.allclose(first, second)


def test_programs_with_per_rank_residuals_are_bound_to_their_ranks():
    bound = apply(sharded(tp=4), ("desync", {"n": 2}), ("overlap", {}))
    assert bound_ranks(bound) == 4
    assert bound_ranks(apply(sharded(), ("ladder", {}))) is None
    single = single_device(bound)
    assert single.mesh == {"tp": 4}
    assert [r.name for r in single.history] == ["tensor_parallel", "desync"]
    own = apply(sharded(), ("ladder", {"variant": "own_partial"}))
    assert bound_ranks(own) == 2


@pytest.mark.parametrize(
    ("name", "rewrite", "message"),
    [
        ("llama", ("desync", {"layers": [1], "pattern": (("keep", "drop"),)}), "no reduction .* can be dropped"),
        ("llama", ("desync", {"pattern": (("drop",),)}), "about 1 reductions, layer 0 has 2"),
        ("olmo2", ("desync", {"n": 4}), "q_norm .* reduces over the ranks inside"),
        ("gpt_neox", ("parallel_block", {}), "blocks parallel: expected attention, then an MLP"),
        ("olmo2", ("parallel_block", {}), "without a norm"),
    ],
)
def test_what_cannot_be_rewired_is_refused_by_name(name, rewrite, message):
    with pytest.raises(RewriterError, match=message):
        apply(sharded(name), ("merge_reductions", {}), rewrite)


@pytest.mark.parametrize("rewrite", [("desync", {"n": 2}), ("ladder", {"variant": "own_partial"})])
def test_per_rank_rewrites_need_ranks(rewrite):
    with pytest.raises(RewriterError, match="give --tp 2 or more"):
        apply(sharded(tp=1), rewrite)
    with pytest.raises(RewriterError, match="Put overlap after it"):
        apply(sharded(), ("overlap", {}), rewrite)


def test_a_norm_over_all_heads_cannot_read_a_residual_of_each_ranks_own():
    config = AutoConfig.for_model("olmoe", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=256)
    program = tensor_parallel(trace(config), 2)
    with pytest.raises(RewriterError, match="reduces over the ranks inside"):
        apply(program, ("ladder", {"variant": "own_partial"}))


def test_a_block_that_every_rank_computes_cannot_read_a_ranks_own_partial():
    """113 channels divide by nothing: the MLP is replicated, and from own partials the ranks would drift apart."""
    config = zoo.config("llama")
    config.intermediate_size = 113
    program = tensor_parallel(trace(config), 2)
    with pytest.raises(RewriterError, match=r"layers\.0\.mlp could not be split"):
        apply(program, ("ladder", {"variant": "own_partial"}))
    apply(program, ("desync", {"pattern": (("drop",), ("keep",))}))


@pytest.mark.parametrize(
    "rewrite", [Ladder(), ParallelBlock(), Desync(n=2), Desync(n=2, resync="sum")], ids=lambda p: p.name
)
def test_all_passes_over_a_layer_that_does_nothing(rewrite):
    """Mllama's cross-attention layers are skipped without an image."""
    config = small_config("mllama")
    model = random_model(config)
    program = tensor_parallel(trace(config), 2)
    assert {b.layer for b in residual_blocks(program)} == {0, 1, 2, 4, 5, 7}
    rewritten = rewrite.apply(program)
    lint(rewritten, rewrite.name)
    assert rewritten.history[-1].notes == ("left as they are, without a residual block: layers 3, 6",)
    ids = random_ids(config, 21)
    tensors = {n: t.detach() for n, t in [*model.named_buffers(), *model.named_parameters()]}
    expected = reference_of(rewritten, [rewrite]).logits(model, ids)
    assert relative_error(simulate(rewritten, ids, weights=tensors), expected) < 1e-4
    assert relative_error(original_logits(model, ids), expected) > 1e-2
    with pytest.raises(RewriterError, match=r"layer 3 has no residual block.*Select other layers, or all"):
        replace(rewrite, layers=[2, 3]).apply(program)
