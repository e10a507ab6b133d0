"""Tokens sharded over ranks: the same function, for every plan, length and mesh; and what would break it is seen."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import zoo
from oracles import ladder_logits, relative_error
from programs import traced, weights
from torch import fx

from rewriter.check.coverage.configs import small_config
from rewriter.common.errors import RewriterError
from rewriter.ir import Program, ops
from rewriter.ir.simulate import simulate
from rewriter.passes.phases import single_device
from rewriter.passes.sequence.sequence_plans import sequence_plan
from rewriter.recipes import Recipe
from rewriter.recipes.apply import apply_recipe
from rewriter.tracing import trace

TENSORS = {"pass": "tensor_parallel"}
OVERLAP = {"pass": "overlap"}
GRIDS = [
    ("attention2d", (1, 2, 2)), ("attention2d", (1, 4, 1)), ("attention2d", (1, 1, 4)), ("attention2d", (1, 2, 3)),
    ("attention2d", (2, 2, 1)), ("ring", (1, 3, 1)), ("ulysses", (4, 1, 1)),
]  # fmt: skip


def recipe(*passes: dict[str, object]) -> Recipe:
    return Recipe.model_validate({"name": "mine", "summary": "one", "paper": "none", "passes": list(passes)})


def sequence(kind: str, grid: tuple[int, int, int]) -> dict[str, object]:
    return {"pass": "sequence_parallel", "kind": kind, "grid": grid}


def rewritten(name: str, *passes: dict[str, object], sp: int = 1, tp: int = 1) -> Program:
    return apply_recipe(traced(name), recipe(*passes), tp=tp, sp=sp)[0]


@functools.cache
def sharded(name: str, kind: str = "attention2d", grid: tuple[int, int, int] = (1, 2, 2)) -> Program:
    ranks = grid[0] * grid[1] * grid[2]
    return rewritten(name, TENSORS, sequence(kind, grid), sp=ranks)


def logits(program: Program, name: str, length: int = 21) -> torch.Tensor:
    with torch.no_grad():
        return simulate(program, batch(name, length), weights=weights(name))


def batch(name: str, length: int = 21) -> torch.Tensor:
    return zoo.batch(2, length, zoo.shared(name).config.vocab_size)


@pytest.mark.parametrize(("kind", "grid"), GRIDS)
def test_every_plan_keeps_the_function_at_any_length(kind, grid):
    program = sharded("llama", kind, grid)
    for length in (1, 21, 48):
        expected = ladder_logits(zoo.shared("llama"), (), batch("llama", length))
        assert relative_error(logits(program, "llama", length), expected) <= 1e-5, length


# windows with norms of heads, learned positions, experts, sinks, latent attention; the others differ less from these
QUICK = ("gemma3_text", "gpt2", "mixtral", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK))
        for n in (*zoo.FAMILIES, *zoo.VARIANTS)
        if n != "gemma2"
    ],
)
def test_every_family_keeps_its_function(name):
    with torch.no_grad():
        expected = zoo.shared(name)(batch(name)).logits
    for kind, grid in (("attention2d", (1, 2, 2)), ("ring", (1, 2, 1))):
        assert relative_error(logits(sharded(name, kind, grid), name), expected) <= 1e-5


def test_caps_on_scores_are_refused_by_name():
    with pytest.raises(RewriterError, match=r"model.layers.0.self_attn caps its scores by 5.0 · tanh.*--sp 1"):
        sharded("gemma2")


# type: changes of its small config, and the refusal
REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "bloom": ({}, r"transformer.h.0.self_attention adds a bias per query and key to its scores \(ALiBi"),
    "deepseek_v32": ({}, "model.layers.0.self_attn sees keys that an indexer chooses among those of all tokens"),
    "roberta": ({}, "the wiring: aten.cumsum sums over the tokens of a call"),  # to count positions
    "lfm2": ({}, "model.layers.0.conv: causal_conv carries a state from token to token"),
    "mamba": ({}, "backbone.layers.0.mixer: causal_conv carries a state from token to token"),
    "jetmoe": ({}, "additive_mask is the mask as a tensor, .*, for model.layers.0.self_attention"),
    "trocr": ({}, "model.decoder.embed_positions: aten.arange.start numbers the tokens of a call from 0"),
    "qwen3_next": ({}, "model.layers.0.linear_attn: causal_conv carries a state from token to token"),
    "xlstm": ({}, r"backbone.blocks.0.mlstm_layer stays the source's own module \(xLSTMLayer\), since RuntimeError"),
    "dbrx": ({}, r"transformer.blocks.0.ffn stays the source's own module \(DbrxFFN\)"),
    "llama4_text": ({}, "model.layers.3.self_attn: aten.arange numbers the tokens of a call from 0"),  # temperatures
}
SLOW = ("qwen3_next", "dbrx", "llama4_text", "deepseek_v32", "trocr", "xlstm", "jetmoe")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in REFUSED])
def test_models_that_read_other_tokens_elsewhere_are_refused_by_name(name):
    changes, message = REFUSED[name]
    config = small_config(name)
    for setting, value in changes.items():
        setattr(config, setting, value)
    with pytest.raises(RewriterError, match=f"sequence_parallel: .*{message}.*--sp 1"):
        apply_recipe(trace(config), recipe(TENSORS, sequence("ring", (1, 2, 1))), sp=2)


# A router computes in fp32 whatever the model's dtype, and its products are of other shapes on a rank.
@pytest.mark.parametrize(("name", "tolerance"), [("llama", 1e-10), ("gpt2", 1e-10), ("mixtral", 1e-6)])
def test_gradients_over_simulated_ranks_are_those_of_one_device(name, tolerance):
    ids = batch(name)
    found = []
    for program in (
        traced(name),
        rewritten(name, TENSORS, sequence("attention2d", (1, 2, 1)), sp=2, tp=2),
    ):
        leaves = {n: p.double().requires_grad_() for n, p in weights(name).items()}
        simulate(program, ids, weights=leaves).square().mean().backward()
        found.append({n: p.grad for n, p in leaves.items()})
    for n, expected in found[0].items():
        assert relative_error(found[1][n], expected) <= tolerance, n


LADDER = {"pass": "ladder", "layers": [1, 3]}


def test_ladder_and_both_axes_are_the_ladder():
    program = rewritten(
        "llama",
        TENSORS,
        LADDER,
        sequence("attention2d", (1, 2, 1)),
        OVERLAP,
        sp=2,
        tp=2,
    )
    wanted = ladder_logits(zoo.shared("llama"), {1, 3}, batch("llama"))
    assert relative_error(logits(program, "llama"), wanted) <= 1e-4
    assert relative_error(wanted, ladder_logits(zoo.shared("llama"), (), batch("llama"))) >= 1e-2
    single = single_device(program)
    assert not single.mesh
    assert sequence_plan(single) is None
    assert [r.name for r in single.history] == ["ladder"]
    assert relative_error(logits(single, "llama"), wanted) <= 1e-5


def test_the_order_of_passes_does_not_matter():
    fuse = {"pass": "fuse_projections"}
    shards, tensors = sequence("attention2d", (2, 1, 2)), TENSORS
    orders = [
        (shards, tensors, fuse, LADDER, OVERLAP),
        (tensors, shards, fuse, LADDER, OVERLAP),
        (tensors, fuse, LADDER, OVERLAP, shards),
    ]
    texts = [rewritten("llama", *order, sp=4, tp=2).text().partition("\nhistory")[0] for order in orders]
    assert texts[0] == texts[1] == texts[2]
    program = rewritten("llama", *orders[2], sp=4, tp=2)
    assert relative_error(logits(program, "llama"), ladder_logits(zoo.shared("llama"), {1, 3}, batch("llama"))) <= 1e-4


def test_an_automatic_plan_knows_a_ranks_own_heads_in_either_order():
    tensors, shards = TENSORS, {"pass": "sequence_parallel"}
    plans = [sequence_plan(rewritten("llama", *order, sp=4, tp=4)) for order in ((tensors, shards), (shards, tensors))]
    assert plans[0] == plans[1]
    with pytest.raises(RewriterError, match="heads=4 does not divide 2 query heads"):
        rewritten("llama", shards | {"kind": "ulysses"}, tensors, sp=4, tp=4)


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, True),
        ({"kind": "attention2d"}, True),
        ({"kind": "attention2d", "grid": [1, 2, 2]}, True),  # whether it overlaps
        ({"kind": "attention2d", "grid": [1, 2, 2], "overlap": False}, False),
        ({"kind": "ring"}, False),
        ({"kind": "ulysses"}, False),
        ({"grid": [4, 1, 1]}, False),
    ],
)
def test_the_length_is_told_where_it_decided(options, chosen):
    program = rewritten("llama", {"pass": "sequence_parallel", "tokens": 1000, **options}, sp=4)
    assert program.history[-1].summary.endswith("planned for 1,000 tokens") == chosen


def test_per_rank_residuals_and_sharded_tokens():
    desync = {"pass": "desync", "layers": [2, 3], "n": 2, "resync": "sum"}
    alone = rewritten("llama", TENSORS, desync, tp=2)
    both = rewritten("llama", TENSORS, desync, sequence("ring", (1, 2, 1)), sp=2, tp=2)
    wanted = logits(alone, "llama")
    assert relative_error(wanted, logits(traced("llama"), "llama")) >= 1e-2
    assert relative_error(logits(both, "llama"), wanted) <= 1e-4
    assert single_device(both).mesh == {"tp": 2}
    assert relative_error(logits(single_device(both), "llama"), wanted) <= 1e-5


def changed(program: Program, choose, change) -> Program:
    """`program` with one node of its wiring changed: a seeded fault."""
    graph, _ = program.edit()
    change(next(n for n in graph.nodes if choose(n)))
    return program.with_(graph=graph)


def shards_of(name: str):
    return lambda node: node.target is ops.shard_tokens and node.args[0].name == name


def gathers(node: fx.Node) -> bool:
    return node.target is ops.gather_tokens


def test_a_wrong_order_of_tokens_or_positions_is_seen():
    """The other layout of as many ranks, in one place."""
    program = sharded("llama")
    wanted = ladder_logits(zoo.shared("llama"), (), batch("llama", 48))
    zigzag = ops.SequencePlan("ring", (1, 4, 1), True)
    assert relative_error(logits(program, "llama", 48), wanted) <= 1e-5
    for place in (shards_of("position_ids"), shards_of("input_ids"), gathers):
        bad = changed(program, place, lambda n: n.update_arg(2, zigzag))
        assert relative_error(logits(bad, "llama", 48), wanted) >= 1e-2
    body = program.modules["model.layers.2.self_attn"]
    graph, _ = replace(program, graph=body.graph).edit()
    attends = next(n for n in graph.nodes if n.target is ops.attention)
    attends.kwargs = {**attends.kwargs, "sequence": zigzag}
    bad = program.with_(modules={**program.modules, "model.layers.2.self_attn": replace(body, graph=graph)})
    assert relative_error(logits(bad, "llama", 48), wanted) >= 1e-2


def bypassed(node: fx.Node) -> None:
    node.replace_all_uses_with(node.args[0])
    node.graph.erase_node(node)


def test_positions_or_logits_that_are_not_sharded_alike_are_seen():
    program = sharded("gpt2")  # its positions are looked up, so that nothing but their number could show
    with pytest.raises((RewriterError, RuntimeError)):
        logits(changed(program, shards_of("position_ids"), bypassed), "gpt2")
    with pytest.raises(RewriterError, match="ranks end with different logits"):
        logits(changed(program, gathers, bypassed), "gpt2")
    both = changed(program, shards_of("position_ids"), bypassed)
    with pytest.raises(RewriterError, match="every rank has all tokens"):
        logits(changed(both, shards_of("input_ids"), bypassed), "gpt2")


def test_positions_counted_on_each_rank_are_seen():
    """What a rank would find that numbers its own tokens from 0."""
    program = sharded("llama")

    def from_zero(node: fx.Node) -> None:
        with node.graph.inserting_after(node):
            zero = node.graph.call_function(torch.ops.aten.floor_divide.default, (node, 4))
        node.replace_all_uses_with(zero, delete_user_cb=lambda user: user is not zero)

    bad = changed(program, shards_of("position_ids"), from_zero)
    assert relative_error(logits(bad, "llama"), ladder_logits(zoo.shared("llama"), (), batch("llama"))) >= 1e-2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "auto", "grid": [2, 2, 2]}, r"grid \[2, 2, 2\] is of 8 ranks, but --sp is 4"),
        ({"kind": "attention2d", "grid": [1, 0, 4]}, r"grid \[1, 0, 4\]: expected .*each 1 or more"),
        ({"kind": "attention2d", "grid": [2, 2]}, r"sequence_parallel.grid: expected .* not \[2, 2\]"),
        ({"kind": "star"}, "sequence_parallel.kind: expected auto or attention2d or ring or ulysses, not 'star'"),
        ({"kind": "ulysses", "grid": [1, 4, 1]}, r"grid \[1, 4, 1\] is no ulysses. .* its grid is \[4, 1, 1\]"),
        ({"tokens": 0}, "sequence_parallel: tokens: 0; expected auto, or a length of 1 or more"),
        ({"tokens": "long"}, "sequence_parallel.tokens: expected .*'auto'.* not 'long'"),
    ],
)
def test_plans_that_cannot_be_are_refused(options, message):
    with pytest.raises(RewriterError, match=message):
        rewritten("llama", {"pass": "sequence_parallel", **options}, sp=4)


def test_the_axis_and_the_recipe_have_to_agree():
    shards = {"pass": "sequence_parallel"}
    with pytest.raises(RewriterError, match="Give --sp 2 or more"):
        rewritten("llama", shards, sp=1)
    program, skipped = apply_recipe(traced("llama"), recipe(shards | {"optional": True}))
    assert [name for name, _ in skipped] == ["sequence_parallel"]
    assert not program.mesh
    for passes, disable in ((TENSORS, ()), (shards, ("sequence_parallel",))):
        with pytest.raises(RewriterError, match="--sp 2: recipe mine has no sequence_parallel"):
            apply_recipe(traced("llama"), recipe(passes), sp=2, disable=disable)
    with pytest.raises(RewriterError, match="tokens are sharded already"):
        rewritten("llama", shards, shards, sp=2)
    with pytest.raises(RewriterError, match="sp=0: expected 1 or more"):
        rewritten("llama", shards, sp=0)


@pytest.mark.parametrize("name", ["attention2d", "ring-attention", "ulysses", "long-context"])
def test_shipped_recipes_compose_with_tensor_parallelism(name):
    program, _ = apply_recipe(traced("llama"), Recipe.load(name), tp=2, sp=2)
    assert list(program.mesh.items()) == [("sp", 2), ("tp", 2)]
    assert relative_error(logits(program, "llama"), ladder_logits(zoo.shared("llama"), (), batch("llama"))) <= 1e-4
