"""Heads and channels in another order: the same function, other shards, undone bit by bit; and the order measured."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from emitted import program as traced
from emitted import source
from oracles import relative_error
from repository import TINY_LLAMA
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import rewriter as rw
from rewriter.check.affinity import affinity, assign_units, measurable, reordered
from rewriter.check.shrunken_check import check_shrunken
from rewriter.common.errors import RewriterError, VerificationError
from rewriter.convert.conversion import save
from rewriter.convert.pass_measurements import calibrate
from rewriter.convert.save_options import SaveOptions
from rewriter.ir import Program
from rewriter.ir.simulate import load_weights, simulate
from rewriter.passes import permute as permute_module
from rewriter.passes.ladder import Ladder
from rewriter.passes.permute import PermutableUnits, Permute, inverse, moved_units, order_of, permutable_units
from rewriter.passes.tensor_parallel import TensorParallel
from rewriter.recipes.apply import apply_recipe
from rewriter.tracing import trace
from rewriter.weights import Checkpoint, ShardPlan, shards
from rewriter.weights.expressions import Concat, Expression, Slice, Stack, Take, Tensor, Transpose, evaluate
from rewriter.weights.references import RankWeights
from rewriter.weights.shards import planned_tensors, shard_pieces

FAST = ["llama", "gpt2", "mixtral"]
SLOW = ["llama_mha_bias", "gpt_neox", "qwen2", "gemma3_text", "olmo2", "qwen3_moe", "gpt_oss", "deepseek_v3"]
FAMILIES = [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@functools.cache
def sharded(family: str, ranks: int) -> Program:
    return TensorParallel().apply(Permute(round_robin=ranks).apply(on(traced(family), ranks)))


def on(program: Program, ranks: int) -> Program:
    return program.with_(mesh={"tp": ranks}, origin=program)


def at(program: Program, directory: Path) -> Program:
    """The same program over the weights in another directory."""
    return program.with_(source=replace(program.source, path=str(directory)))


def logits(family: str, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return zoo.shared(family)(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_the_function_is_the_same_and_every_shard_another(family: str, tmp_path: Path) -> None:
    program, ids = traced(family), zoo.batch(2, 21)
    wanted = logits(family, ids)
    for ranks in (2, 4):
        assert relative_error(simulate(sharded(family, ranks), ids), wanted) <= 1e-5
    save(sharded(family, 2), tmp_path / "out", options=SaveOptions(verify="none"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    with torch.no_grad():
        assert relative_error(model(input_ids=ids, use_cache=False).logits, wanted) <= 1e-5
    configs = [json.loads((d / "config.json").read_text()) for d in (source(family), tmp_path / "out")]
    assert configs[0] == configs[1]

    before, after = load_weights(program), load_weights(at(program, tmp_path / "out"))
    for block in permutable_units(program):
        assert block.reason is None
        order = order_of("10" * (block.count // 2))
        again = reordered(after, block, inverse(order))
        for name, shard in block.places.items():
            assert not torch.equal(before[name], after[name])
            assert torch.equal(before[name], again[name])  # undone bit by bit
            assert torch.equal(reordered(before, block, order)[name], after[name])
            for rank, held in enumerate(sharded(family, 2).parameters[name].ranges or ()):
                held_by = RankWeights.open(tmp_path / "out", tmp_path / "out/runtime/tp2/weights.json", rank)
                mine = held_by.read({name: None}, "cpu")[name]
                assert torch.equal(
                    mine, torch.cat([after[name].narrow(shard.dim, a, b - a) for a, b in held], shard.dim)
                )


def test_a_rank_holds_the_units_that_it_is_told(tmp_path: Path) -> None:
    """Written out for one layer: rank 0 gets key/value head 1 with its queries, and channels 1, 3, 5, …"""
    paths = {"model.layers.1.self_attn": "10", "model.layers.1.mlp": "10" * 56}
    program = TensorParallel().apply(Permute(paths).apply(on(traced("llama"), 2)))
    checkpoint, disk = Checkpoint.open(source("llama")), load_weights(traced("llama"))
    on_rank = {name: checkpoint.evaluate(spec.on_rank(0)) for name, spec in program.parameters.items()}
    layer = "model.layers.1."
    assert torch.equal(on_rank[f"{layer}self_attn.q_proj.weight"], disk[f"{layer}self_attn.q_proj.weight"][32:])
    assert torch.equal(on_rank[f"{layer}self_attn.k_proj.weight"], disk[f"{layer}self_attn.k_proj.weight"][8:])
    assert torch.equal(on_rank[f"{layer}self_attn.o_proj.weight"], disk[f"{layer}self_attn.o_proj.weight"][:, 32:])
    assert torch.equal(on_rank[f"{layer}mlp.up_proj.weight"], disk[f"{layer}mlp.up_proj.weight"][1::2])
    assert torch.equal(on_rank[f"{layer}mlp.down_proj.weight"], disk[f"{layer}mlp.down_proj.weight"][:, 1::2])
    name = "model.layers.0.mlp.up_proj.weight"
    assert program.parameters[name].expression == Tensor(name)


def test_one_key_value_head_stays_and_its_query_heads_move(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "falcon", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, multi_query=True,
        new_decoder_architecture=False, parallel_attn=True, bias=False, alibi=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path)
    program, ids = trace(tmp_path), torch.arange(20).reshape(2, 10)
    permuted = Permute(round_robin=2).apply(program)
    name = "transformer.h.0.self_attention.query_key_value.weight"
    before, after = load_weights(program)[name], load_weights(permuted)[name]
    assert torch.equal(after, torch.cat([before[8:16], before[24:32], before[:8], before[16:24], before[32:]]))
    assert relative_error(simulate(permuted, ids), model(input_ids=ids).logits) <= 1e-5


@pytest.mark.slow
def test_heads_with_a_position_bias_of_their_own_stay() -> None:
    config = AutoConfig.for_model("bloom", hidden_size=32, n_layer=2, n_head=4, vocab_size=64)
    blocks_ = {b.path.rpartition(".")[2]: b for b in permutable_units(trace(config))}
    assert "position bias" in str(blocks_["self_attention"].reason)
    permuted = Permute(round_robin=2).apply(trace(config))
    assert "transformer.h.0.self_attention and 1 like it left in order" in permuted.history[-1].notes[0]


# Seeded faults: what is forgotten must show


@pytest.mark.parametrize(
    ("family", "forgotten"),
    [
        ("llama", "self_attn.q_proj.weight"),
        ("llama", "self_attn.o_proj.weight"),
        ("llama", "mlp.gate_proj.weight"),
        ("llama", "mlp.down_proj.weight"),
        pytest.param("llama_mha_bias", "self_attn.v_proj.bias", marks=pytest.mark.slow),
        ("gpt2", "mlp.c_fc.bias"),
        ("gpt2", "attn.c_attn.bias"),
        ("mixtral", "mlp.experts.down_proj"),
    ],
)
def test_a_forgotten_parameter_shows(family: str, forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(program: Program) -> list[PermutableUnits]:
        found = permutable_units(program)
        return [
            replace(b, places={n: s for n, s in b.places.items() if not n.endswith(forgotten)})
            if f"{b.path}.".find(".1.") >= 0
            else b
            for b in found
        ]

    monkeypatch.setattr(permute_module, "permutable_units", faulty)
    ids = zoo.batch(2, 21)
    wrong = simulate(Permute(round_robin=2).apply(traced(family)), ids)
    assert relative_error(wrong, logits(family, ids)) >= 1e-2


def test_query_heads_that_leave_their_key_value_head_show() -> None:
    """Eight query heads on two key/value heads, moved one by one."""
    weights, ids = load_weights(traced("llama")), zoo.batch(2, 21)
    for name in ("q_proj", "o_proj"):
        path = f"model.layers.1.self_attn.{name}.weight"
        heads = torch.tensor([1, 3, 5, 7, 0, 2, 4, 6])[:, None] * 8 + torch.arange(8)
        weights[path] = weights[path].index_select(int(name == "o_proj"), heads.flatten())
    assert relative_error(simulate(traced("llama"), ids, weights=weights), logits("llama", ids)) >= 1e-2


@pytest.mark.slow
def test_the_shrunken_check_reorders_the_copy_and_sees_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = [Permute({"model.layers.3.mlp": "10" * 56}), TensorParallel(), Ladder(variant="own_partial")]
    assert {"heads and channels reordered = original model", "rewritten = its reference"} <= set(check_figures(passes))

    def faulty(program: Program) -> list[PermutableUnits]:
        return [
            replace(b, places={n: s for n, s in b.places.items() if not n.endswith("up_proj.weight")})
            for b in permutable_units(program)
        ]

    monkeypatch.setattr(permute_module, "permutable_units", faulty)
    with pytest.raises(VerificationError, match="heads and channels reordered = original model: worst at"):
        check_figures(passes)


def check_figures(passes: list[Any]) -> dict[str, float]:
    config = zoo.config("llama")
    config.num_hidden_layers = 2
    return check_shrunken(config, passes, 2).figures()


# What a pass is told


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"ranks": {"a": "0100"}}, "each rank from 0 on equally often"),
        ({"ranks": {"a": "0022"}}, "each rank from 0 on equally often"),
        ({"ranks": {"a": "01"}, "round_robin": 2}, "either ranks or round_robin"),
        ({"round_robin": 0}, "round_robin=0; expected 1 to 36"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], part: str) -> None:
    with pytest.raises(RewriterError, match=part):
        Permute(**options)


@pytest.mark.parametrize(
    ("ranks", "part"),
    [
        (None, "there is no measurement. Convert a checkpoint"),
        ({"model.layers.9.mlp": "01"}, "'model.layers.9.mlp' is no block with heads or channels. There are model.la"),
        ({"model.layers.0.mlp": "01"}, "name 2 units, it has 112"),
        ({"model.layers.0.mlp": "0123" * 28}, "are for 4 ranks, here are 2. Measure again"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(ranks: Any, part: str) -> None:
    with pytest.raises(RewriterError, match=part):
        Permute(ranks).apply(on(traced("llama"), 2))


def test_it_comes_before_the_split() -> None:
    with pytest.raises(RewriterError, match="put it before tensor_parallel"):
        Permute(round_robin=2).apply(TensorParallel().apply(on(traced("llama"), 2)))


def test_weights_in_the_order_already_are_not_moved_again(tmp_path: Path) -> None:
    ranks = {"model.layers.1.self_attn": "10", "model.layers.1.mlp": "10" * 56}
    once = Permute(ranks).apply(traced("llama"))
    save(once, tmp_path / "out", options=SaveOptions(verify="none"))
    again = Permute(ranks, applied=True).apply(at(traced("llama"), tmp_path / "out"))
    assert all(torch.equal(t, load_weights(again)[n]) for n, t in load_weights(once).items())
    assert again.history[-1].options["applied"]
    assert again.history[-1].options["ranks"] == ranks
    assert json.loads((tmp_path / "out" / "rewrite.json").read_text())["passes"][0]["options"]["ranks"] == ranks


def test_orders() -> None:
    assert order_of("0110") == (0, 3, 1, 2)
    assert inverse(order_of("0110")) == (0, 2, 3, 1)
    assert moved_units("0110") == 2
    assert moved_units("0011") == 0


# Streams of files


@pytest.mark.parametrize(
    "expression",
    [
        Take(Tensor("a"), 0, (5, 0, 3)),
        Take(Tensor("a"), 1, (3, 3, 0, 6)),
        Slice(Take(Tensor("a"), 1, (6, 5, 4, 3, 2, 1, 0)), 1, ((1, 3), (5, 7))),
        Slice(Take(Tensor("a"), 0, (5, 4, 3, 2, 1, 0)), 1, ((2, 4),)),
        Take(Slice(Tensor("a"), 0, ((1, 3), (4, 6))), 0, (3, 0, 2, 1)),
        Take(Concat((Tensor("a"), Tensor("b")), 0), 0, (9, 0, 8, 1, 2, 7)),
        Take(Stack((Tensor("a"), Take(Tensor("a"), 0, (5, 4, 3, 2, 1, 0))), 1), 2, (2, 1)),
        Take(Take(Transpose(Tensor("a"), 0, 1), 0, (6, 0, 3)), 1, (5, 1)),
        Take(Take(Tensor("a"), 0, (5, 1, 3)), 0, (2, 0)),
        Transpose(Take(Tensor("a"), 0, (5, 1, 3)), 0, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("limit", [8, 60, 1 << 20])
def test_places_are_streamed_in_pieces(
    expression: Expression, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"a": torch.randn(6, 7), "b": torch.randn(4, 7)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    monkeypatch.setattr(shards, "MADE", limit)
    items = planned_tensors(checkpoint, ShardPlan(tmp_path / "x", {"x": (expression, None)}))
    _, *pieces = map(bytes, shard_pieces(checkpoint, items, {}, {}))
    assert max(map(len, pieces)) <= limit
    assert b"".join(pieces) == evaluate(expression, checkpoint.read).contiguous().numpy().tobytes()


@pytest.mark.parametrize("index", [(), (6,), (-1,)])
def test_places_that_do_not_exist_are_refused(index: tuple[int, ...]) -> None:
    with pytest.raises(RewriterError, match="place"):
        Take(Tensor("a"), 0, index).shape({"a": (6, 7)})


# The measurement


@pytest.mark.parametrize(("ranks", "width"), [(2, 1), (2, 3), (3, 1)])
def test_units_are_dealt_evenly_and_nearly_best(ranks: int, width: int) -> None:
    generator = torch.Generator().manual_seed(ranks + width)
    units = 6
    errors = torch.randn(ranks, 20, units * width, generator=generator)
    weight = torch.randn(units * width, 5, generator=generator)

    def error(dealt: tuple[int, ...]) -> float:
        chosen = [errors[rank, :, u * width : (u + 1) * width] for u, rank in enumerate(dealt)]
        return float((torch.cat(chosen, 1) @ weight).square().sum())

    all_ = set(itertools.permutations(sorted(list(range(ranks)) * (units // ranks))))
    found = tuple(assign_units(errors, weight, units))
    assert found in all_
    ranked = sorted(map(error, all_))
    assert error(found) <= ranked[len(ranked) // 10]


RECIPE = {"name": "x", "summary": "x", "paper": "x"}


def with_order(*passes: dict[str, Any], **options: Any) -> rw.Recipe:
    listed = [{"pass": "permute", **options}, {"pass": "tensor_parallel"}, *passes]
    return rw.Recipe.model_validate({**RECIPE, "passes": listed})


@pytest.mark.slow
@pytest.mark.parametrize("passes", [{"pass": "desync", "n": 2}, {"pass": "ladder", "variant": "own_partial"}])
def test_the_measured_order_lowers_the_drift_of_the_tiny_model(passes: dict[str, Any]) -> None:
    program = tiny()
    rewritten = measurable(program, with_order(passes, ranks={}), 2)
    assert rewritten is not None
    found = affinity(program, rewritten, text()[:680])
    assert found.after < 0.9 * found.before
    assert set(map(len, found.ranks.values())) <= {4, 512}
    assert len(found.ranks) >= 6


@functools.cache
def tiny() -> Program:
    return trace(TINY_LLAMA)


@functools.cache
def text() -> torch.Tensor:
    return torch.tensor(list((TINY_LLAMA / "heldout.txt").read_bytes()[:4096]))


def test_a_recipe_without_an_order_is_measured_and_another_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = calibrate(with_order({"pass": "desync", "n": 2}), traced("llama"), 2)
    options = measured.passes[0].options
    assert "512 tokens on 2 ranks, random tokens" in options["measured_on"]
    rewritten = rw.rewrite(traced("llama"), measured, tp=2)
    assert rewritten.history[0].name == "permute"
    assert rewritten.history[0].fired == bool(options["ranks"])
    monkeypatch.setattr("rewriter.check.affinity.affinity", lambda *_, **__: pytest.fail("measured"))
    assert calibrate(measured, traced("llama"), 2) is measured
    plain = calibrate(with_order(), traced("llama"), 2)
    assert plain.passes[0].options == {"ranks": {}, "measured_on": "every rank computes with the same residual"}


def test_weights_that_are_too_large_keep_their_order_where_the_recipe_allows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rewriter.check.drift.available_memory", lambda: 1_000_000)
    with pytest.raises(RewriterError, match=r"by a measurement, but the real weights were not run.* leave the pass"):
        calibrate(with_order({"pass": "desync", "n": 2}), traced("llama"), 2)
    left = calibrate(rw.Recipe.load("desync-2x"), traced("llama"), 2)
    program, skipped = apply_recipe(traced("llama"), left, 2)
    assert "permute" not in [entry.name for entry in program.history]
    [why] = [reason for name, reason in skipped if name == "permute"]
    assert "measured on the weights, and the real weights were not run: in fp32 they take" in why


@pytest.mark.slow
def test_an_order_that_is_worse_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The assignment is turned round: every unit goes where it reads worst."""

    def worst(errors: torch.Tensor, weight: torch.Tensor, units: int) -> list[int]:
        return [1 - rank for rank in assign_units(errors, weight, units)]

    monkeypatch.setattr("rewriter.check.affinity.assign_units", worst)
    rewritten = measurable(tiny(), with_order({"pass": "desync", "n": 2}, ranks={}), 2)
    assert rewritten is not None
    found = affinity(tiny(), rewritten, text()[:680])
    assert found.after > found.before
    assert found.ranks == {}
    assert "which is not taken" in str(found)


def test_inspection_leaves_the_order() -> None:
    from rewriter.explain.inspection import inspect

    config = zoo.config("llama")
    config.num_hidden_layers = 2
    rules = inspect(config, with_order({"pass": "desync", "n": 2}), tp=2).data["rules"]
    assert any("they are left in order here" in rule["reason"] for rule in rules)
