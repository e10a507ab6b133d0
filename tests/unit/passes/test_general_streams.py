"""Ladder on streams that are more than x + f(x), against recursions written by hand (tests/support/recursions.py)."""

from __future__ import annotations

import functools

import emitted
import pytest
import recursions
import torch
from general_streams import few_layers
from programs import OVERLAP, applied, tensor_parallel

from rewriter.check.comparison import relative_error
from rewriter.check.random_model import build_model, random_ids, randomize, save_model
from rewriter.check.reference_modes import reference_of
from rewriter.check.stream_hooks import decoder_layers
from rewriter.common.errors import RewriterError
from rewriter.emit.huggingface import emit_huggingface
from rewriter.ir import ops
from rewriter.ir.communication import collectives
from rewriter.ir.phases import PromptPhase
from rewriter.ir.residual import residual_blocks
from rewriter.ir.simulate import simulate
from rewriter.passes.ladder import Ladder
from rewriter.passes.phases import both_wirings
from rewriter.tracing import trace

FAST = ("bart", "gemma4_text", "qwen4_exp_text")
TYPES = [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in sorted(recursions.LAYERS)]
WHICH = ["every second", *(pytest.param(which, marks=pytest.mark.slow) for which in ("all", "upper half"))]
# modules that are called as they are, in the checkpoint's dtype, or compute in fp32 whatever the model's is
_IN_FP32 = ("deepseek_v4", "hy_v4", "qwen4_exp_text")
DIFFERENT = 1e-2


@functools.cache
def case(name, scratch):
    """(model, program, weights, ids) of a type's small model."""
    config = few_layers(name)
    model = build_model(config)
    randomize(model)
    model.eval()
    save_model(model, config, scratch / name)
    program = trace(scratch / name)
    model.to(torch.float32 if name in _IN_FP32 else torch.float64)
    weights = {n: t.detach() for n, t in (*model.named_buffers(), *model.named_parameters())}
    return model, program, weights, random_ids(config, 12)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("general_streams")


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def simulated(program, ids, weights):
    with torch.no_grad():
        return simulate(program, ids, weights=weights)


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("name", TYPES)
def test_ladder_equals_the_recursion(name, which, scratch):
    model, program, weights, ids = case(name, scratch)
    layers = decoder_layers(model)
    count = len(layers)
    late = {"all": range(count), "upper half": range(count // 2, count), "every second": range(1, count, 2)}[which]
    with recursions.laddered(model, layers, name, ()):
        assert relative_error(logits(model, ids), logits(model, ids)) == 0
        plain = logits(model, ids)
    assert relative_error(plain, logits(model, ids)) < 1e-5  # the blocks are those of the model
    with recursions.laddered(model, layers, name, set(late)):
        expected = logits(model, ids)
    assert relative_error(expected, plain) > DIFFERENT
    ladder = Ladder(sorted(late)).apply(program)
    assert relative_error(simulated(ladder, ids, weights), expected) < (1e-5 if name in _IN_FP32 else 1e-6)
    for ranks in (2, 4):
        sharded = applied(tensor_parallel(program, ranks), ("ladder", {"layers": sorted(late)}), OVERLAP)
        assert relative_error(simulated(sharded, ids, weights), expected) < 1e-5


MIXING = [
    n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in ("deepseek_v4", "hy_v4", "qwen4_exp_text")
]


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("name", MIXING)
def test_late_coefficients_equal_the_recursion(name, which, scratch):
    model, program, weights, ids = case(name, scratch)
    layers = decoder_layers(model)
    late = {"all": range(len(layers)), "upper half": range(len(layers) // 2, len(layers))}.get(which)
    late = sorted(late or range(1, len(layers), 2))
    with recursions.laddered(model, layers, name, set(late)):
        fresh = logits(model, ids)
    with recursions.laddered(model, layers, name, set(late), late_coefficients=True):
        expected = logits(model, ids)
    assert relative_error(expected, fresh) > 1e-3
    rewrite = Ladder(late, coefficients="late")
    ladder = rewrite.apply(program)
    assert relative_error(simulated(ladder, ids, weights), expected) < 1e-5
    assert relative_error(reference_of(ladder, [rewrite]).logits(model, ids), expected) < 1e-6
    sharded = applied(tensor_parallel(program, 2), ("ladder", {"layers": late, "coefficients": "late"}), OVERLAP)
    assert relative_error(simulated(sharded, ids, weights), expected) < 1e-5


def test_late_coefficients_at_tokens_of_prompts_alone(scratch):
    model, program, weights, ids = case("qwen4_exp_text", scratch)
    rewrite = Ladder([1, 2], coefficients="late", phase="prompt", exact_tail=3, exact_head=2)
    rewired = PromptPhase(3, 2).rewired(ids.shape[1]).expand(ids.shape)
    both = both_wirings(rewrite.apply(program))
    with torch.no_grad():
        found = simulate(both, ids, weights=weights, rewired=rewired)
    reference = reference_of(both, [rewrite])
    expected = reference.logits(model, ids, rewired)
    assert relative_error(found, expected) < 1e-5
    assert relative_error(expected, reference.logits(model, ids, torch.ones_like(rewired))) > 1e-3


def test_layers_with_fresh_and_late_coefficients_are_one_ladder(scratch):
    model, program, weights, ids = case("qwen4_exp_text", scratch)
    passes = [Ladder([0, 1]), Ladder([2, 3], coefficients="late")]
    both = passes[1].apply(passes[0].apply(program))
    assert not [b for b in residual_blocks(both) if b.index and b.layer < 4 and b.reads == (b.index,)]
    expected = reference_of(both, passes).logits(model, ids)
    assert relative_error(simulated(both, ids, weights), expected) < 1e-5
    other_order = passes[0].apply(passes[1].apply(program))
    assert relative_error(simulated(other_order, ids, weights), expected) < 1e-5


def test_late_coefficients_need_coefficients_that_ranks_have_alike(scratch):
    _, program, weights, ids = case("bart", scratch)  # K is a norm
    late = Ladder(coefficients="late").apply(program)
    assert "changes nothing in 8 of 8 blocks" in late.history[-1].notes[0]
    assert torch.equal(simulated(late, ids, weights), simulated(Ladder().apply(program), ids, weights))
    with pytest.raises(RewriterError, match="Use coefficients: fresh, or variant: paper"):
        applied(tensor_parallel(program, 2), ("ladder", {"variant": "own_partial", "coefficients": "late"}))


@pytest.mark.parametrize("name", TYPES)
def test_overlap_changes_no_bit(name, scratch):
    """K and b are computed while the sum travels: the same operations in the same order."""
    _, program, weights, ids = case(name, scratch)
    for steps in ((), (("ladder", {}),)):
        sharded = tensor_parallel(program, 2, *steps)
        expected = simulated(sharded, ids, weights)
        for branches in (1, 2):
            overlapped = applied(sharded, ("overlap", {"branches": branches}))
            assert torch.equal(simulated(overlapped, ids, weights), expected)


def trivial(model):
    """One stream, and coefficients of exactly 1."""
    for module in model.modules():
        if hasattr(module, "hc_post_magnitude"):
            module.hc_post_magnitude, module.hc_eps = 1.0, 0.0
            module.scale.data.zero_()
            module.base.data.fill_(60.0)
        if hasattr(module, "hc_fn"):
            module.eps = 0.0
            module.hc_scale.data.zero_()
            module.hc_base.data.fill_(60.0)


def plain_ladder(layer, hidden, before, kw):
    """(h, p) of SEMANTICS: one layer of today's ladder, on a stream without mixing."""
    out, _, places = layer.self_attn(hidden_states=layer.input_layernorm(before), **kw)
    attended = hidden + out
    return attended + layer.mlp(layer.post_attention_layernorm(hidden)), attended, places


def test_one_stream_and_trivial_coefficients_are_the_plain_ladder_to_the_bit():
    config = few_layers("hy_v4")
    config.hc_mult = 1
    model = build_model(config)
    randomize(model)
    trivial(model)
    model.eval()
    layers, ids = decoder_layers(model), random_ids(config, 12)
    with recursions.laddered(model, layers, "hy_v4", range(len(layers))):
        general = logits(model, ids)
    state = {}

    def forward(index, layer, hidden_states, **kw):
        hidden = hidden_states[:, :, 0]
        before = state.get("p", hidden) if index else hidden
        out, state["p"], places = plain_ladder(layer, hidden, before, kw)
        return out.unsqueeze(2), places

    for index, layer in enumerate(layers):
        layer.forward = lambda hidden, _i=index, _l=layer, **kw: forward(_i, _l, hidden, **kw)
    plain = logits(model, ids)
    for layer in layers:
        del layer.forward
    assert torch.equal(general, plain)
    assert relative_error(plain, logits(model, ids)) > DIFFERENT


OWN = ["bart", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma4_text", "glm_moe_dsa", "hy_v4"))]


def own_partial(name):
    config = few_layers(name)
    model = build_model(config)
    randomize(model)
    model.eval()
    ids, program = random_ids(config, 12), trace(config)
    weights = {n: t.detach() for n, t in (*model.named_buffers(), *model.named_parameters())}
    sharded = applied(tensor_parallel(program, 2), ("ladder", {"variant": "own_partial"}))
    expected = reference_of(sharded, [Ladder(variant="own_partial")]).logits(model, ids)
    assert relative_error(expected, reference_of(sharded, [Ladder()]).logits(model, ids)) > DIFFERENT
    return sharded, ids, weights, expected


@pytest.mark.parametrize("name", OWN)
def test_own_partial_equals_its_reference(name):
    sharded, ids, weights, expected = own_partial(name)
    assert relative_error(simulated(sharded, ids, weights), expected) < 1e-5


@pytest.mark.slow
def test_ranks_choose_keys_of_their_own(monkeypatch):
    """Seeded: a rank that looks at the keys which the rank before it chose is found."""
    sharded, ids, weights, expected = own_partial("glm_moe_dsa")
    top_keys, chosen = ops.top_keys, []

    def exchanged(*args, **options):
        chosen.append(top_keys(*args, **options))
        return chosen[-2] if len(chosen) % 2 == 0 else chosen[-1]

    for body in sharded.modules.values():
        for node in body.graph.nodes if hasattr(body, "graph") else ():
            if node.target is top_keys:
                monkeypatch.setattr(node, "target", exchanged)
    assert relative_error(simulated(sharded, ids, weights), expected) > 1e-4
    assert chosen


@pytest.mark.parametrize("name", ["bart", pytest.param("gemma4_text", marks=pytest.mark.slow)])
def test_the_checkpoint_of_an_own_partial_ladder_computes_what_its_ranks_do(name, scratch):
    """BART's layers norm at their end what the next one reads; Gemma 4's scale the stream, and share keys."""
    _, program, weights, ids = case(name, scratch)
    sharded = applied(tensor_parallel(program, 2), ("ladder", {"variant": "own_partial"}))
    expected = simulated(sharded, ids, weights)
    assert relative_error(expected, simulated(program, ids, weights)) > DIFFERENT
    emitted.write(emit_huggingface(sharded), scratch / name, scratch / f"own_partial_{name}")
    model = emitted.load(scratch / f"own_partial_{name}").to(torch.float64)
    assert relative_error(logits(model, ids), expected) < 1e-5


def test_ranks_with_several_vectors_of_their_own_have_no_checkpoint(scratch):
    program = trace(few_layers("hy_v4"))
    sharded = applied(tensor_parallel(program, 2), ("ladder", {"variant": "own_partial"}))
    with pytest.raises(RewriterError, match=r"layer 0: .* stream of several vectors .* variant: paper"):
        emit_huggingface(sharded)


def test_a_ladder_hides_sums_where_modules_compute_what_is_carried_on():
    """Qwen 4 Exp's gates and carried streams come of one module, with projections that wait for the sum as well."""
    program = trace(few_layers("qwen4_exp_text"))
    sharded = applied(tensor_parallel(program, 2), ("ladder", {}), OVERLAP)
    sums = [m for m in collectives(sharded) if m.place == "block"]
    assert sums
    assert all(m.hidden for m in sums)
    # the projections that make one stream of several, before the head, are not gathered
    assert [m.place for m in collectives(sharded)].count("head") == 1


@pytest.mark.parametrize("name", ["bart", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gemma4_text", "hy_v4"))])
def test_prompts_alone_are_rewired(name, scratch):
    """Exact tokens at both ends see keys of rewired ones, and rewired tokens those of exact ones."""
    model, program, weights, ids = case(name, scratch)
    ladder = Ladder(phase="prompt", exact_tail=3, exact_head=2)
    sharded = applied(tensor_parallel(program, 2), ("ladder", {"phase": "prompt", "exact_tail": 3, "exact_head": 2}))
    rewired = PromptPhase(3, 2).rewired(ids.shape[1]).expand(len(ids), -1)
    reference = reference_of(sharded, [ladder])
    expected = reference.logits(model, ids, rewired=rewired)
    for other in (reference_of(sharded, [Ladder()]).logits(model, ids), logits(model, ids)):
        assert relative_error(expected, other) > DIFFERENT
    with torch.no_grad():
        actual = simulate(both_wirings(sharded), ids, weights=weights, rewired=rewired)
    assert relative_error(actual, expected) < 1e-5


def test_a_block_with_sums_inside_takes_a_ladder_alone():
    """LongCat Flash: its sums inside are no coefficients, and its second block is no MLP beside the first."""
    program = trace(few_layers("longcat_flash"))
    late, fresh = (Ladder(coefficients=coefficients).apply(program) for coefficients in ("late", "fresh"))
    assert str(late.graph) == str(fresh.graph) != str(program.graph)
    sharded = tensor_parallel(program, 2)
    with pytest.raises(RewriterError, match=r"layer 0 has the blocks attention, parallel: expected attention, then"):
        applied(sharded, ("parallel_block", {"norm": "own"}))
    with pytest.raises(RewriterError, match=r"block model\.layers\.0 does more .* has sums inside"):
        applied(sharded, ("desync", {"n": 2}))
