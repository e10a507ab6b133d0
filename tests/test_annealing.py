"""Annealed conversion: the original at λ = 0, the recipe at λ = 1, and between them what SEMANTICS.md says.

The oracles are written here, on the unmodified eager model (hooks) and in plain float64 tensors of every rank. They
know nothing of programs or passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import emitted
import oracles
import programs
import pytest
import torch
import zoo
from test_per_rank_oracle import Plain, gpt_neox, llama
from torch import fx, nn
from transformers import PreTrainedModel

from rewriter import ops
from rewriter.adapt.anneal_schedule import annealed_layers, set_annealing
from rewriter.common.errors import RewriterError
from rewriter.emit.annealed import write_annealed
from rewriter.emit.huggingface import emit_huggingface
from rewriter.emit.runtime_module import emit_runtime_module
from rewriter.ir import Program
from rewriter.ir.marks import mark, marks
from rewriter.passes.annealing import annealed
from rewriter.passes.base import single_device
from rewriter.passes.desync import Desync
from rewriter.passes.drop_sync import DropSync
from rewriter.passes.fuse_projections import FuseProjections
from rewriter.passes.ladder import Ladder
from rewriter.passes.merge_reductions import MergeReductions
from rewriter.passes.overlap import Overlap
from rewriter.passes.parallel_block import ParallelBlock
from rewriter.passes.tensor_parallel import TensorParallel
from rewriter.recipes.apply import lint
from rewriter.verify.simulate import simulate

CLOSE = 1e-5  # against an oracle that adds in another order, or in float64
ROUNDING = 1e-6  # the same operations, but for the order of a few sums
DIFFERENT = 1e-2

# --- recipes: passes, ranks, and what each layer then is -------------------------------------------------------------

MEAN_2X, SUM_2X = ("mean", (False, True)), ("sum", (False, True))
RECIPES: Mapping[str, tuple[tuple[Any, ...], int, Sequence[Any]]] = {
    "ladder": ((Ladder(),), 1, ["ladder"] * 4),
    "upper-half": ((Ladder("upper-half"),), 1, ["standard", "standard", "ladder", "ladder"]),
    "scattered": ((Ladder([1, 3]),), 1, ["standard", "ladder"] * 2),
    "parallel": ((ParallelBlock(),), 1, ["attention"] * 4),
    "parallel-mlp": ((ParallelBlock(norm="mlp"),), 1, ["mlp"] * 4),
    "parallel-own": ((ParallelBlock([0, 2], norm="own"),), 1, ["own", "standard"] * 2),
    "parallel-ladder": ((ParallelBlock([0, 1], norm="own"), Ladder([2, 3])), 1, ["own", "own", "ladder", "ladder"]),
    "2x": ((Desync(n=2),), 2, [MEAN_2X] * 4),
    "2x-sum": ((Desync(n=2, resync="sum"),), 2, [SUM_2X] * 4),
    "4x": ((Desync(n=4),), 2, [("mean", (False, False)), MEAN_2X] * 2),
    "4x-sum": ((Desync(n=4, resync="sum"),), 2, [("sum", (False, False)), SUM_2X] * 2),
    "own-partial": ((Ladder(variant="own_partial"),), 2, ["own-partial"] * 4),
    "drop-sync": ((DropSync(layers=[1, 2]),), 2, ["standard", SUM_2X, SUM_2X, "standard"]),
    "mix": (
        (ParallelBlock([0], norm="own"), MergeReductions(), Ladder([1]), Desync([2], n=2), Ladder([3], "own_partial")),
        2,
        ["own", "ladder", MEAN_2X, "own-partial"],
    ),
    "own-partial-standard": (
        (Ladder([0, 1], "own_partial"),),
        2,
        ["own-partial", "own-partial", "standard", "standard"],
    ),
}
BOUND = [name for name, (_, ranks, _) in RECIPES.items() if ranks > 1]


@functools.cache
def _program(family: str, recipe: str, ranks: int) -> Program:
    result = emitted.program(family)
    if ranks > 1:
        result = TensorParallel().apply(result.with_(mesh={"tp": ranks}))
    for rewrite in RECIPES[recipe][0]:
        result = rewrite.apply(result)
    return result


def program(family: str, recipe: str, ranks: int | None = None) -> Program:
    return _program(family, recipe, ranks or RECIPES[recipe][1])


@functools.cache
def _annealed_model(family: str, recipe: str, ranks: int) -> PreTrainedModel:
    write_annealed(program(family, recipe, ranks), emitted.source(family), _place(family, recipe, ranks))
    return emitted.load(_place(family, recipe, ranks))


def _place(family: str, recipe: str, ranks: int) -> Path:
    return emitted.source(family).parent / f"annealing-{family}-{recipe}-{ranks}"


def annealed_model(family: str, recipe: str, ranks: int | None = None) -> PreTrainedModel:
    """Made once per process; every test sets λ first."""
    return _annealed_model(family, recipe, ranks or RECIPES[recipe][1])


def own_model(family: str, recipe: str, **options: Any) -> PreTrainedModel:
    """One that a test may change."""
    annealed_model(family, recipe)
    return emitted.load(_place(family, recipe, RECIPES[recipe][1]), **options)


def shipped_model(family: str, recipe: str, ranks: int | None, out: Path) -> PreTrainedModel:
    emitted.write(emit_huggingface(program(family, recipe, ranks)), emitted.source(family), out)
    return emitted.load(out)


def at(model: PreTrainedModel, value: float | Mapping[int, float]) -> torch.Tensor:
    """Logits with λ of every layer, or by layer."""
    layers = annealed_layers(model)
    set_annealing(model, dict.fromkeys(layers, value) if isinstance(value, float) else value)
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=zoo.batch(), use_cache=False).logits
    return logits


def original(family: str) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = zoo.shared(family)(input_ids=zoo.batch(), use_cache=False).logits
    return logits


# --- oracles ---------------------------------------------------------------------------------------------------------

Lambdas = Sequence[float]
_ENTRIES = {
    "gpt2": ("ln_1", "ln_2", "attn", "mlp"),
    "gemma2": ("input_layernorm", "pre_feedforward_layernorm", "self_attn", "mlp"),
}
_USUAL = ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp")


@contextmanager
def hooked(model: PreTrainedModel, modes: Sequence[str], lambdas: Lambdas) -> Iterator[PreTrainedModel]:
    """The eager model whose blocks read what annealing says: ladder and parallel layers, on one device.

    Block j of layer i would read stream X_j; it reads (1 - λ_i) X_j + λ_i X_{its stale index}. A parallel layer writes
    as before. Where one norm serves both halves, what the norms return is blended instead.
    """
    layers = oracles.layers_of(model)
    names = _ENTRIES.get(model.config.model_type, _USUAL)
    together = bool(getattr(model.config, "use_parallel_residual", False))
    streams: list[torch.Tensor] = []
    handles = []

    def mixed(rate: float, fresh: torch.Tensor, stale: torch.Tensor) -> torch.Tensor:
        return fresh * (1 - rate) + stale * rate

    def changed(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (change(args[0]), *args[1:]), kwargs
            return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def entry(module: nn.Module, block: int, stale: int, rate: float) -> None:
        def change(x: torch.Tensor) -> torch.Tensor:
            del streams[block:]
            streams.append(x)
            return mixed(rate, x, streams[stale]) if stale < block else x

        changed(module, change)

    for i, (layer, mode, rate) in enumerate(zip(layers, modes, lambdas, strict=True)):
        norms = [getattr(layer, name) for name in names[:2]]
        for place, norm in enumerate(norms):
            block = i if together else 2 * i + place
            stale = max(block - 1, 0) if mode == "ladder" else block
            if mode == "ladder" and place == 0 and i and modes[i - 1] == "own":
                stale = block - 2  # a parallel layer is one block
            entry(norm, block, 2 * i if mode == "own" else stale, rate)
        if mode in ("attention", "mlp"):
            serving = norms[mode == "mlp"]
            for place, main in enumerate(names[2:]):

                def change(
                    x: torch.Tensor, norm: nn.Module = serving, first: int = 2 * i, rate: float = rate
                ) -> torch.Tensor:
                    return mixed(rate, x, type(norm).forward(norm, streams[first]))

                if names[place] != names[mode == "mlp"] or place == 1:
                    changed(getattr(layer, main), change)
    try:
        yield model
    finally:
        for handle in handles:
            handle.remove()


def on_ranks(model: Plain, modes: Sequence[Any], ranks: int, lambdas: Lambdas) -> torch.Tensor:
    """Logits of annealed layers of every mode over ranks, written out with each rank's own slices of the weights."""
    x = [model.embedding] * ranks  # what each rank holds
    streams, parts = [x[0]], list[list[torch.Tensor]]()  # before each block; what each rank wrote in it
    agreed, added = x[0], [torch.zeros_like(x[0])] * ranks  # where ranks last held the same; what each wrote since
    for layer, (mode, rate) in enumerate(zip(modes, lambdas, strict=True)):
        before = modes[layer - 1] if layer else None
        first = len(parts)
        for place, branch in enumerate(model.branches):
            previous = mode if place else before
            fresh, stale = list(x), list(x)
            if mode in ("ladder", "own-partial") and parts and previous in (mode, "standard", "own"):
                back = len(model.branches) if previous == "own" else 1
                stale = [streams[-1 - back]] * ranks
                if mode == "own-partial":
                    stale = [a + f for a, f in zip(stale, parts[-1], strict=True)]
            elif mode == "own":
                stale = [streams[first]] * ranks
            reads = [(1 - rate) * a + rate * b for a, b in zip(fresh, stale, strict=True)]
            f = [branch(layer, rank, reads[rank]) for rank in range(ranks)]
            total = torch.stack(f).sum(0)
            added = [a + b for a, b in zip(added, f, strict=True)]
            if isinstance(mode, tuple) and not mode[1][place]:
                x = [a + rate * b + (1 - rate) * total for a, b in zip(x, f, strict=True)]
            else:
                if not isinstance(mode, tuple):
                    value = x[0] + total
                elif mode[0] == "mean":
                    value = torch.stack([b + a / ranks for a, b in zip(x, f, strict=True)]).sum(0)
                else:
                    value = agreed + torch.stack(added).sum(0)
                x, agreed, added = [value] * ranks, value, [torch.zeros_like(value)] * ranks
            streams.append(x[0])
            parts.append(f)
    return model.head(x[0])


def plain(family: str, ranks: int) -> Plain:
    model = zoo.shared(family)
    weights = {n: p.detach().double() for n, p in model.named_parameters()}
    return (gpt_neox if family == "gpt_neox" else llama)(weights, model.config, ranks, zoo.batch())


# --- the two ends ----------------------------------------------------------------------------------------------------


def slow(*cases: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


FEW = ("ladder", "upper-half", "parallel", "parallel-ladder", "2x", "4x-sum", "own-partial", "drop-sync", "mix")
ENDS = [
    *[("llama", name, None) for name in FEW],
    *slow(*[("gpt2", name, None) for name in ("ladder", "parallel", "4x-sum")]),
    ("mixtral", "upper-half", None),
    ("mixtral", "2x", None),
    *slow(*[("llama", name, None) for name in RECIPES if name not in FEW]),
    *slow(("gpt_neox", "ladder", None), ("gpt_neox", "own-partial", None), ("llama", "4x-sum", 4)),
]


@pytest.mark.parametrize(("family", "recipe", "ranks"), ENDS, ids=str)
def test_it_goes_from_the_original_to_the_recipe(family: str, recipe: str, ranks: int | None, tmp_path: Path) -> None:
    """At λ = 0 a ladder is the original bit for bit; what adds in another order (parallel layers, sums over ranks) is
    it up to rounding. At λ = 1 everything is the recipe bit for bit."""
    model, source = annealed_model(family, recipe, ranks), original(family)
    begin, end = at(model, 0.0), at(model, 1.0)
    if recipe in ("ladder", "upper-half", "scattered"):
        assert torch.equal(begin, source)
    assert oracles.relative_error(begin, source) <= 2 * ROUNDING
    shipped = shipped_model(family, recipe, ranks, tmp_path / "shipped")
    with torch.no_grad():
        assert torch.equal(end, shipped(input_ids=zoo.batch(), use_cache=False).logits)
    assert oracles.relative_error(begin, end) >= DIFFERENT
    assert {n: p.shape for n, p in model.state_dict().items()} == {n: p.shape for n, p in shipped.state_dict().items()}
    assert model.config.rewriter_layers == shipped.config.rewriter_layers


# --- between ---------------------------------------------------------------------------------------------------------

HOOKED = [
    *[("llama", name) for name in FEW if name not in BOUND],
    *slow(*[("gpt2", name) for name in ("ladder", "parallel", "parallel-mlp")]),
    ("mixtral", "upper-half"),
    *slow(*[("gpt2", name) for name in ("scattered", "parallel-own")]),
    *slow(*[("gpt_neox", name) for name in ("ladder", "scattered")]),
    *slow(*[("gemma2", name) for name in ("ladder", "parallel")]),  # norms behind blocks
]
UNEVEN = (0.25, 0.5, 0.75, 0.375)  # a λ for each layer


@pytest.mark.parametrize(("family", "recipe"), HOOKED, ids=str)
def test_between_the_ends_it_equals_hooks_on_the_eager_model(family: str, recipe: str) -> None:
    model, modes = annealed_model(family, recipe), RECIPES[recipe][2]
    ends = at(model, 0.0), at(model, 1.0)
    for lambdas in ((0.5,) * 4, UNEVEN):
        actual = at(model, {i: lambdas[i] for i in annealed_layers(model)})
        with hooked(zoo.shared(family), modes, lambdas):
            assert oracles.relative_error(actual, original(family)) <= CLOSE
        assert min(oracles.relative_error(actual, end) for end in ends) >= DIFFERENT / 2


@pytest.mark.parametrize(("family", "recipe"), [("llama", "upper-half"), ("gpt2", "parallel")], ids=str)
def test_gradients_equal_those_of_the_hooks(family: str, recipe: str) -> None:
    model, eager = annealed_model(family, recipe), zoo.build(family)
    set_annealing(model, {i: UNEVEN[i] for i in annealed_layers(model)})
    with hooked(eager, RECIPES[recipe][2], UNEVEN):
        expected = gradients(eager)
    actual = gradients(model)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert oracles.relative_error(actual[name], gradient) <= 10 * CLOSE, name


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(input_ids=zoo.batch(), labels=zoo.batch(), use_cache=False).loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


PLAIN = [
    *[("llama", name, 2) for name in BOUND if name in FEW],
    ("mixtral", "2x", 2),
    ("llama", "4x-sum", 4),
    ("llama", "upper-half", 1),
    *slow(*[("llama", name, 2) for name in BOUND if name not in FEW]),
    *slow(("llama", "own-partial", 4), ("mixtral", "4x-sum", 2), ("gpt_neox", "own-partial", 2)),
]


@pytest.mark.parametrize(("family", "recipe", "ranks"), PLAIN, ids=str)
@torch.no_grad()
def test_between_the_ends_it_equals_ranks_written_out(family: str, recipe: str, ranks: int) -> None:
    model, modes = annealed_model(family, recipe, ranks), RECIPES[recipe][2]
    for lambdas in ((0.5,) * 4, UNEVEN):
        actual = at(model, {i: lambdas[i] for i in annealed_layers(model)})
        expected = on_ranks(plain(family, ranks), modes, ranks, lambdas)
        assert oracles.relative_error(actual, expected) <= CLOSE
    assert min(oracles.relative_error(actual, at(model, end)) for end in (0.0, 1.0)) >= DIFFERENT / 2


@pytest.mark.parametrize(
    ("family", "recipe"), [("gpt2", "4x-sum"), ("llama", "mix"), ("mixtral", "2x"), ("gemma2", "4x-sum")], ids=str
)
def test_all_ranks_and_their_gradients_equal_the_simulated_ranks(family: str, recipe: str) -> None:
    """The printed layers compute what the program says, node by node, on ranks."""
    between = annealed(single_device(program(family, recipe)), at=0.5)
    lint(between, "annealing")
    weights = {n: p.detach().clone().requires_grad_() for n, p in zoo.shared(family).named_parameters()}
    model, ids = annealed_model(family, recipe), zoo.batch()
    set_annealing(model, dict.fromkeys(annealed_layers(model), 0.5))
    expected, actual = simulate(between, ids, weights=weights), model(input_ids=ids, use_cache=False).logits
    assert oracles.relative_error(actual.detach(), expected.detach()) <= CLOSE
    model.zero_grad(set_to_none=True)
    for logits in (expected, actual):
        logits.float().square().mean().backward()
    for name, parameter in model.named_parameters():
        assert oracles.relative_error(parameter.grad, weights[name].grad) <= 10 * CLOSE, name


@pytest.mark.slow
@pytest.mark.parametrize("family", [*zoo.FAMILIES, *zoo.VARIANTS])
@torch.no_grad()
def test_every_family_goes_from_the_original_to_the_recipe(family: str) -> None:
    """Simulated; a recipe that a family refuses is left out, and none refuses the ladder."""
    weights, source = programs.weights(family), original(family)
    for name, (passes, ranks, _) in RECIPES.items():
        recipe = programs.traced(family)
        try:
            if ranks > 1:
                recipe = TensorParallel().apply(recipe.with_(mesh={"tp": ranks}))
            for rewrite in passes:
                recipe = rewrite.apply(recipe)
        except RewriterError:
            assert "ladder" not in RECIPES[name][2] or len(passes) > 1
            continue
        begin, end = (annealed(recipe, value) for value in (0.0, 1.0))
        lint(begin, "annealing")
        shipped = simulate(recipe, zoo.batch(), weights=weights)
        assert oracles.relative_error(simulate(begin, zoo.batch(), weights=weights), source) <= 2 * ROUNDING
        assert torch.equal(simulate(end, zoo.batch(), weights=weights), shipped)
        assert oracles.relative_error(shipped, source) >= DIFFERENT


# --- faults ----------------------------------------------------------------------------------------------------------


def blends(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target is ops.blend]


def swapped(graph: fx.Graph) -> None:
    for node in blends(graph):
        node.args = (node.args[1], node.args[0], node.args[2])


def one_left_out(graph: fx.Graph) -> None:
    node = blends(graph)[1]
    node.replace_all_uses_with(node.args[1])


def outputs_blended(graph: fx.Graph) -> None:
    """What the first reader returns is blended, not what it is given: alike at both ends, another function between."""
    node = blends(graph)[0]
    reader = next(iter(node.users))
    with graph.inserting_before(reader):
        each = [graph.node_copy(reader, lambda n, x=x: x if n is node else n) for x in node.args[:2]]
        both = graph.call_function(ops.blend, (*each, node.args[2]))
    mark(both, layer=marks(reader).layer)
    reader.replace_all_uses_with(both)


FAULTS = [
    *[(recipe, fault) for recipe in ("ladder", "own-partial") for fault in (swapped, one_left_out, outputs_blended)],
    *[(recipe, fault) for recipe in ("4x", "4x-sum") for fault in (swapped, one_left_out)],
]


@pytest.mark.parametrize(("recipe", "fault"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
@torch.no_grad()
def test_faults_are_noticed(recipe: str, fault: Callable[[fx.Graph], None]) -> None:
    ranks, modes = RECIPES[recipe][1:]
    weights = {n: p.detach() for n, p in zoo.shared("llama").named_parameters()}
    between = annealed(single_device(program("llama", recipe)), at=0.25)
    expected = on_ranks(plain("llama", ranks), modes, ranks, (0.25,) * 4)
    assert oracles.relative_error(simulate(between, zoo.batch(), weights=weights), expected) <= CLOSE
    wrong = simulate(emitted.edited(between, fault), zoo.batch(), weights=weights)
    assert oracles.relative_error(wrong, expected) >= 100 * CLOSE


def test_the_layers_come_from_the_model() -> None:
    model = annealed_model("llama", "upper-half")
    assert list(annealed_layers(model)) == [2, 3]
    at(model, {2: 0.5, 3: 1.0})
    assert [layer.annealing for layer in annealed_layers(model).values()] == [0.5, 1.0]


# --- what is refused -------------------------------------------------------------------------------------------------


def test_what_cannot_be_annealed_is_refused_by_name() -> None:
    exact = TensorParallel().apply(emitted.program("llama").with_(mesh={"tp": 2}))
    for nothing in (emitted.program("llama"), exact):
        with pytest.raises(RewriterError, match="annealing: "):
            emit_huggingface(nothing, annealed=True)
    side_by_side = ParallelBlock().apply(emitted.program("llama"))
    with pytest.raises(RewriterError, match=r"layers.0.* is no module of the original"):
        annealed(FuseProjections().apply(side_by_side))
    with pytest.raises(RewriterError, match="anneal before overlap"):
        annealed(Overlap().apply(Ladder().apply(exact)))
    with pytest.raises(RewriterError, match=r"annealing: the sharded runtime module"):
        emit_runtime_module(annealed(program("llama", "4x-sum")))
    with pytest.raises(RewriterError, match="exists"):
        write_annealed(program("llama", "ladder"), emitted.source("llama"), emitted.source("llama"))
    with pytest.raises(RewriterError, match="no layer of LlamaForCausalLM"):
        set_annealing(zoo.shared("llama"), {0: 0.5})
    model = annealed_model("llama", "upper-half")
    with pytest.raises(RewriterError, match=r"layer 1 does not anneal; layers that do: \[2, 3\]"):
        set_annealing(model, {1: 0.5})
    with pytest.raises(RewriterError, match=r"λ = 1.5 of layer 2"):
        set_annealing(model, {2: 1.5})
