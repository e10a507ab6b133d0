"""Each pass does what its docstring says, on every family of the zoo, and faults are seen."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import faults
import pytest
import torch
import zoo
from oracles import ladder_logits, ladder_oracle, relative_error
from programs import PASSES, program, tensor_parallel, traced, weights

import rewriter
from rewriter.common.errors import RewriterError
from rewriter.ir import ops
from rewriter.ir.marks import marks
from rewriter.ir.residual import residual_blocks
from rewriter.ir.simulate import simulate
from rewriter.passes.phases import single_device
from rewriter.tracing import trace


def logits(some_program, name, ids=None):
    ids = zoo.batch(2, 21, zoo.shared(name).config.vocab_size) if ids is None else ids
    with torch.no_grad():
        return simulate(some_program, ids, weights=weights(name))


def expected(name, layers=(), length=21):
    return ladder_logits(zoo.shared(name), layers, zoo.batch(2, length, zoo.shared(name).config.vocab_size))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", zoo.FAMILIES)
@pytest.mark.fast("llama-4", "gpt2-4", "qwen2-2", "gemma2-2", "qwen3_moe-2")
def test_ladder_over_simulated_ranks_equals_the_oracle(name, tp):
    for layers in zoo.selections(traced(name).source.num_layers).values():
        wanted = expected(name, layers)
        assert relative_error(wanted, expected(name)) >= 1e-2  # else equality would mean nothing
        assert relative_error(logits(program(name, layers, tp), name), wanted) <= (1e-5 if tp == 1 else 1e-4)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_tensor_parallel_equals_the_unmodified_model(name, tp):
    assert relative_error(logits(program(name, (), tp), name), expected(name)) <= 1e-4


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma2", "gpt2", "gpt_neox", "olmo2", "qwen3", "mixtral"])
def test_gradients_over_simulated_ranks_equal_the_oracle(name):
    model, ids = zoo.build(name), zoo.batch(2, 21, zoo.shared(name).config.vocab_size)
    ids[:, ::7] = 0  # the padding token, whose row of the embedding has no gradient
    leaves = {n: p.clone().requires_grad_() for n, p in weights(name).items()}
    simulate(program(name, {1, 3}, 4), ids, weights=leaves).square().mean().backward()
    with ladder_oracle(model, {1, 3}) as oracle:
        oracle(ids).logits.square().mean().backward()
    for n, p in model.named_parameters():
        assert relative_error(leaves[n].grad, p.grad) <= 1e-4, n


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("tp", [1, 2])
def test_swapped_blocks_and_drained_transitions_are_seen(name, tp):
    layers = zoo.selections(traced(name).source.num_layers)["upper-half"]
    good, wanted = program(name, layers, tp, overlap=False), expected(name, layers)
    assert relative_error(logits(good, name), wanted) <= 1e-4
    for bad in (faults.blocks_swapped(good, min(layers)), faults.transition_drained(good, min(layers))):
        assert relative_error(logits(bad, name), wanted) >= 1e-2


@pytest.mark.parametrize("number", [0, 3, 6])
def test_a_missing_reduction_is_seen(number):
    bad = faults.reduction_missing(program("llama", {2, 3}, 2), number)
    with pytest.raises(RewriterError, match="a reduction is missing"):
        logits(bad, "llama")


def test_the_last_missing_reduction_changes_the_logits():
    """Nothing enters rank-local computation after it, and the head's gather hides that ranks differ."""
    bad = faults.reduction_missing(program("llama", {2, 3}, 2), 7)
    try:
        error = relative_error(logits(bad, "llama"), expected("llama", {2, 3}))
    except RewriterError:
        return
    assert error >= 1e-2


def test_reducing_a_replicated_value_is_refused():
    """A second all-reduce of the same sum would multiply it by the number of ranks."""
    sharded = program("llama", (), 2, overlap=False)
    graph, _ = sharded.edit()
    first = next(n for n in graph.nodes if n.target is ops.all_reduce)
    with graph.inserting_after(first):
        again = graph.call_function(ops.all_reduce, (first, "tp"))
    first.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    with pytest.raises(RewriterError, match="multiply"):
        logits(sharded.with_(graph=graph), "llama")


def test_passes_leave_their_input_untouched():
    before = traced("llama").fingerprint()
    program("llama", {2, 3}, 2)
    assert traced("llama").fingerprint() == before


def test_the_blocks_of_a_ladder_read_one_block_earlier_and_no_other():
    blocks = residual_blocks(program("llama", {1, 3}, overlap=False))
    assert [b.reads for b in blocks] == [(0,), (1,), (1,), (2,), (4,), (5,), (5,), (6,)]
    assert [b.kind for b in blocks] == ["attention", "mlp"] * 4


def test_layer_zero_of_a_ladder_is_a_parallel_block():
    assert [b.reads for b in residual_blocks(program("llama", {0}))][:3] == [(0,), (0,), (2,)]


def test_parallel_blocks_are_one_block_per_layer_and_merge_their_reductions():
    plain, sharded = traced("gpt_neox"), program("gpt_neox", (), 2, overlap=False)
    assert [b.kind for b in residual_blocks(plain)] == ["parallel"] * 4
    assert sum(n.target is ops.all_reduce and marks(n).layer is not None for n in sharded.graph.nodes) == 4


@pytest.mark.parametrize("name", zoo.FAMILIES)
@pytest.mark.fast("llama", "gpt2", "gpt_neox", "gemma2", "qwen3_moe")
def test_overlap_changes_no_bit(name):
    """Sums are the same; what ranks compute while they travel is, too."""
    for layers in ((), range(traced(name).source.num_layers)):
        early, plain = program(name, layers, 2), program(name, layers, 2, overlap=False)
        started = [node for node in early.graph.nodes if node.target is ops.all_reduce_start]
        assert bool(started) == bool(layers)
        assert torch.equal(logits(early, name), logits(plain, name))


def test_overlap_waits_right_before_the_first_use():
    graph = program("llama", {0, 1, 2, 3}, 2).graph
    order = {n: i for i, n in enumerate(graph.nodes)}
    waits = [n for n in graph.nodes if n.target is ops.all_reduce_wait]
    assert len(waits) == 7  # nothing hides the last reduction, so it stays one
    assert sum(n.target is ops.all_reduce and marks(n).layer is not None for n in graph.nodes) == 1
    for wait in waits:
        assert min(order[u] for u in wait.users) == order[wait] + 1
        assert order[wait.args[0]] == order[wait.args[0].args[0]] + 1  # started as soon as the partial is there


def test_a_full_ladder_hides_all_but_the_last_reductions():
    hidden = program("llama", {0, 1, 2, 3}, 2).history[-1].summary
    assert hidden.startswith("7 of 8")
    assert program("llama", (), 2).history[-1].summary.startswith("0 of 8")


def test_single_device_drops_what_concerns_ranks_only():
    single = single_device(program("llama", {2, 3}, 4))
    assert not single.mesh
    assert [r.name for r in single.history] == ["ladder"]
    assert relative_error(logits(single, "llama"), expected("llama", {2, 3})) <= 1e-5


def test_no_communication_removes_every_collective_but_keeps_shapes():
    silent = PASSES["no_communication"]().apply(program("olmo2", (), 2))
    bodies = [m.graph for m in silent.modules.values() if hasattr(m, "graph")]
    for graph in (silent.graph, *bodies):
        assert not any(n.target in ops.COLLECTIVES for n in graph.nodes)
    with pytest.raises(RewriterError, match="one device"):
        PASSES["no_communication"]().apply(traced("llama"))


@pytest.mark.parametrize(
    ("name", "tp", "message"),
    [
        ("llama", 3, "8 query heads do not divide by 3. Nearest: 2, 4"),
        ("gpt2", 8, "4 query heads do not divide by 8. Nearest: 4"),
    ],
)
def test_degrees_that_do_not_divide_are_refused_with_the_nearest(name, tp, message):
    with pytest.raises(RewriterError, match=message):
        program(name, (), tp)


def test_a_vocabulary_that_does_not_divide_stays_replicated_and_is_noted():
    sharded = program("qwen2", (), 2)
    notes = sharded.history[0].notes
    assert any("259" in note for note in notes)
    assert sharded.parameters["model.embed_tokens.weight"].ranges is None


def test_key_value_heads_are_replicated_where_they_do_not_divide():
    two_heads_on_four_ranks = program("llama", (), 4).parameters["model.layers.0.self_attn.k_proj.weight"]
    assert two_heads_on_four_ranks.shared
    assert two_heads_on_four_ranks.ranges == (((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),))


def test_fused_projections_are_split_by_heads_inside_each_part():
    fused = program("gpt2", (), 2).parameters["transformer.h.0.attn.c_attn.weight"]
    assert fused.dim == 1
    assert fused.ranges == (((0, 32), (64, 96), (128, 160)), ((32, 64), (96, 128), (160, 192)))


@pytest.mark.parametrize("layers", ["first:9", [7], "2-9"])
def test_selections_beyond_the_model_are_refused(layers):
    with pytest.raises(RewriterError):
        PASSES["ladder"](layers).apply(traced("llama"))


def test_a_second_ladder_over_the_same_layers_is_refused():
    with pytest.raises(RewriterError, match="rewired before"):
        PASSES["ladder"]("all").apply(program("llama", {1}, overlap=False))


def test_a_position_table_as_long_as_the_vocabulary_is_not_split():
    config = zoo.config("gpt2")
    config.vocab_size = config.n_positions
    sharded = tensor_parallel(trace(config), 2)
    assert sharded.parameters["transformer.wte.weight"].ranges is not None
    assert sharded.parameters["transformer.wpe.weight"].ranges is None


# A pass is closed in its file

PACKAGE = Path(rewriter.__file__).parent


def outside() -> list[Path]:
    """The package without the passes, and without the reference, whose modes are its own words."""
    references = [PACKAGE / "check" / f"{name}.py" for name in ("per_rank_reference", "withheld_reference")]
    inside = (PACKAGE / "passes", *references)
    return [file for file in PACKAGE.rglob("*.py") if not any(file.is_relative_to(place) for place in inside)]


def told_apart(source: str) -> list[str]:
    """Where code asks which pass it has: by class, or by name."""
    classes = {p.__name__ for p in PASSES.values()}
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            found += [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in classes]
        if isinstance(node, ast.Compare):
            found += [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and n.value in set(PASSES)]
    return found


@pytest.mark.parametrize(
    "seeded",
    [
        "isinstance(rewrite, Permute)",
        "isinstance(p, (Overlap, Ladder))",
        "if name == 'drop_sync': pass",
        "x in ('permute',)",
    ],
)
def test_a_place_that_tells_passes_apart_is_found(seeded):
    assert told_apart(seeded)


def test_nothing_outside_the_room_tells_passes_apart():
    assert {str(f.relative_to(PACKAGE)): found for f in outside() if (found := told_apart(f.read_text()))} == {}


def test_references_import_neither_analyses_nor_passes():
    independent = ("per_rank_reference", "stream_hooks", "withheld_reference", "exit_shares")
    forbidden = {PACKAGE / "check" / f"{name}.py": "ir|passes" for name in independent}
    forbidden |= {PACKAGE / "check" / "reference_modes.py": "passes", PACKAGE / "weights" / "plain_model.py": r"\w+"}
    for file, rooms in forbidden.items():
        assert not re.search(rf"^\s*(from|import) rewriter\.({rooms})", file.read_text(), re.MULTILINE), file


@pytest.mark.parametrize("name", sorted(PASSES))
def test_an_approximating_pass_says_what_it_is_verified_with(name):
    known = PASSES[name]
    if known.effect == "approximating" and known.scope != "runtime":
        assert known.reference_modes is not None or known.oracle is not None
