"""`rewrite bisect`: a fault is found where it was put, by pass, layer and operator; and none where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import bisect_faults as faults
import pytest
import torch
import zoo
from repository import TINY_LLAMA

from rewriter.cli import main
from rewriter.common.errors import RewriterError
from rewriter.convert.pass_measurements import calibrate
from rewriter.explain.bisect.finding import Bisection
from rewriter.explain.bisect.passes import bisect_passes, bisect_recipe, real_material
from rewriter.explain.bisect.values import difference, reordered
from rewriter.ir import Program, ops
from rewriter.passes import available
from rewriter.recipes.apply import load_recipe
from rewriter.tracing import trace

aten = torch.ops.aten


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("saved")

    @cache
    def made(family: str) -> Path:
        zoo.save(family, root / family)
        return root / family

    return made


@cache
def _material(path: Path) -> Any:
    return real_material(trace(path))


def bisected(path: Path, recipe: str, tp: int) -> Bisection:
    found, material = Bisection(recipe), _material(path)
    bisect_passes(material, _passes(path, recipe, tp), {"tp": tp}, found)
    return found


@cache
def _passes(path: Path, recipe: str, tp: int) -> list[Any]:
    return calibrate(load_recipe(recipe), _material(path).traced, tp).build()


def broken(monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[[Program], Program]) -> None:
    """From now on the pass makes this fault."""
    kind = available()[name]
    right = kind.apply
    monkeypatch.setattr(kind, "apply", lambda self, program: fault(right(self, program)))


MLP, ATTENTION, NORM = "model.layers.{}.mlp", "model.layers.{}.self_attn", "model.layers.{}.post_attention_layernorm"
O_PROJ, V_PROJ = f"{ATTENTION}.o_proj.weight", f"{ATTENTION}.v_proj.weight"
LN = "transformer.h.{}.ln_2.weight"

# (pass, model, recipe, what is done to the program after the pass, layer, end of the module's path, the statement, a
# line of the difference that begins so; "" where the statement is enough)
FAULTS: list[tuple[str, str, str, Any, int | None, str, str, str]] = [
    ("tensor_parallel", "llama", "ladder", partial(faults.reduction_missing, layer=1, place=0), 1, "",
     "add_2 = add(add_1, model_layers_1_self_attn)", ""),
    ("tensor_parallel", "llama", "ladder", partial(faults.scaled, layer=2, place=1, factor=0.5), 2, "",
     "add_5 = add(add_4, mul)", "+mul = mul(all_reduce_5, 0.5)"),
    ("tensor_parallel", "llama", "ladder", partial(faults.reduced_too_late, layer=2, place=0), 2, "",
     "all_reduce_9 = all_reduce(add_4, 'tp')", "+all_reduce_9"),
    ("merge_reductions", "llama", "ladder", partial(faults.subtracted, layer=3, place=0), 3, "",
     "add_6 = sub(add_5, all_reduce_6)", "-add_6 = add(add_5, all_reduce_6)"),
    ("merge_reductions", "qwen2", "tensor-parallel", partial(faults.add_dropped, layer=1, place=1), 1, "",
     "add_3 = add(add_2, all_reduce_3)", "-add_3"),
    ("ladder", "llama", "ladder", partial(faults.wrong_operand, layer=2, place=0), 2, "",
     "add_4 = add(add_3, all_reduce_3)", "-add_4 = add(add_3, all_reduce_4)"),
    ("ladder", "llama", "ladder", partial(faults.reads, layer=3, place=0, value=6), 3, "layers.3.input_layernorm",
     "input_layernorm(add_5)", ""),
    ("ladder", "llama", "ladder", partial(faults.add_dropped, layer=1, place=0), 1, "",
     "add_3 = add(add_1, all_reduce_3)", "-add_2 = add(add_1, all_reduce_2)"),
    ("desync", "llama", "desync-2x", partial(faults.scaled, layer=2, place=1, factor=2.0), 2, "",
     "add_19 = all_reduce(mul_4, 'tp')", "+mul_4"),
    ("parallel_block", "llama", "parallel", partial(faults.reads, layer=2, place=0, value=1), 2,
     "layers.2.input_layernorm", "input_layernorm(add_10)", "-model_layers_2_input_layernorm"),
    ("tensor_parallel", "llama", "ladder",
     partial(faults.constant, path=NORM.format(2), target=aten.add.Tensor, value=0.1), 2,
     "layers.2.post_attention_layernorm", "aten.add.Tensor(mean_dim, 0.1)", "-    add_tensor = aten.add.Tensor"),
    ("ladder", "llama", "ladder", partial(faults.dropped, path=MLP.format(1), target=aten.silu.default), 1,
     "layers.1.mlp", "aten.mul.Tensor(gate_proj, up_proj)", "-    silu_default = aten.silu(gate_proj)"),
    ("tensor_parallel", "mistral", "tensor-parallel",
     partial(faults.other_operator, path=MLP.format(3), target=aten.mul.Tensor, other=aten.add.Tensor), 3,
     "layers.3.mlp", "aten.add.Tensor(silu_default, up_proj)", "-    mul_tensor = aten.mul.Tensor"),
    ("tensor_parallel", "llama", "tensor-parallel",
     partial(faults.inserted, path=ATTENTION.format(1), after="k_proj", factor=0.9), 1,
     "layers.1.self_attn", "aten.reshape(mul_tensor_4", "+    mul_tensor_4 = aten.mul.Tensor(k_proj, 0.9)"),
    ("fuse_projections", "llama", "ladder", partial(faults.attention_scale, path=ATTENTION.format(2), factor=0.5), 2,
     "layers.2.self_attn", "attention = attention(", "-    attention = attention("),
    ("overlap", "llama", "ladder", partial(faults.exchanged, path=ATTENTION.format(0), target=ops.attention), 0,
     "layers.0.self_attn", "self_attn", "+    attention = attention(add_tensor_1, add_tensor,"),
    ("tensor_parallel", "llama", "ladder", partial(faults.ranks_exchanged, name=f"{MLP.format(1)}.down_proj.weight"), 1,
     "mlp.down_proj", "down_proj = down_proj(mul_tensor)", "+model.layers.1.mlp.down_proj.weight"),
    ("merge_reductions", "gpt2", "tensor-parallel",
     partial(faults.other_tensor, name=LN.format(2), tensor=LN.format(1)), 2,
     "h.2.ln_2", "transformer.h.2.ln_2(add_4)", f"+{LN.format(2)}[64] = {LN.format(1)}"),
    ("tensor_parallel", "llama", "ladder",
     partial(faults.other_tensor, name=O_PROJ.format(3), tensor=O_PROJ.format(0)), 3,
     "layers.3.self_attn.o_proj", "o_proj = o_proj(", f"+{O_PROJ.format(3)}[64, 32] = {O_PROJ.format(0)}"),
    ("tensor_parallel", "llama", "ladder", partial(faults.buffer_changed, path="model.rotary_emb", name="inv_freq"),
     None, "rotary_emb", "inv_freq", "+  inv_freq: float32[4] = 1.5, 0.15, 0.015"),
    ("permute", "llama", "ladder-own-partial",
     partial(faults.other_tensor, name=V_PROJ.format(2), tensor=V_PROJ.format(1)), 2,
     "layers.2.self_attn.v_proj", "v_proj = v_proj(", f"+{V_PROJ.format(2)}[16, 64] = {V_PROJ.format(1)}"),
    ("ladder", "qwen3_moe", "ladder", partial(faults.reduction_missing, layer=2, place=1), 2, "",
     "add_5 = add(add_4, model_layers_2_mlp)", "-all_reduce_5"),
    ("tensor_parallel", "gemma2", "tensor-parallel",
     partial(faults.constant, path="model.layers.2.pre_feedforward_layernorm", target=aten.add.Tensor, value=2.0,
             number=-1), 2,
     "layers.2.pre_feedforward_layernorm", "aten.add.Tensor(to_dtype_1, 2.0)", "-    add_tensor_1 = aten.add.Tensor"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "family", "recipe", "fault", "layer", "module", "statement", "change"), FAULTS,
    ids=[f"{i}-{f[0]}-{f[3].func.__name__}" for i, f in enumerate(FAULTS)],
)  # fmt: skip
def test_a_fault_of_a_pass_is_found_where_it_was_put(
    monkeypatch: pytest.MonkeyPatch, saved: Callable[[str], Path], name: str, family: str, recipe: str, fault: Any,
    layer: int | None, module: str, statement: str, change: str,
) -> None:  # fmt: skip
    path = saved(family)
    ranks = 1 if recipe == "parallel" else 2
    _passes(path, recipe, ranks)  # measured before the fault is there
    broken(monkeypatch, name, fault)
    found = bisected(path, recipe, ranks)
    assert found.fault is not None, found.steps
    got = found.fault
    assert (got.stage, got.layer) == (name, layer)
    assert got.module.endswith(module)
    assert bool(got.module) == bool(module)
    assert statement in got.statement
    assert any(line.startswith(change) for line in got.difference), got.difference
    assert [step.held for step in found.steps] == [*[True] * (len(found.steps) - 1), False]
    assert found.steps[-1].name == name


@pytest.mark.parametrize(
    ("family", "recipe", "tp"),
    [("llama", "ladder", 2), ("qwen3_moe", "desync-2x", 2), ("gemma2", "ladder", 2), ("gpt2", "ladder-own-partial", 2)],
)
@pytest.mark.fast("llama-ladder-2")
def test_where_nothing_is_wrong_nothing_is_found(
    saved: Callable[[str], Path], family: str, recipe: str, tp: int
) -> None:
    found = bisected(saved(family), recipe, tp)
    assert found.fault is None
    assert found.steps[0].name == "tracing"
    assert all(step.held for step in found.steps)


@pytest.mark.parametrize(
    ("fault", "statement", "module"),
    [
        (partial(faults.dropped, path=MLP.format(2), target=aten.silu.default), "aten.mul.Tensor(", MLP.format(2)),
        (partial(faults.scaled, layer=2, place=1, factor=3.0), "add_5 = add(add_4, mul)", ""),
    ],
)
def test_a_fault_of_tracing_is_found(saved: Callable[[str], Path], fault: Any, statement: str, module: str) -> None:
    material = replace(_material(saved("llama")), traced=fault(_material(saved("llama")).traced))
    found = Bisection("")
    bisect_passes(material, [], {"tp": 1}, found)
    assert found.fault is not None
    assert (found.fault.stage, found.fault.layer) == ("tracing", 2)
    assert statement in found.fault.statement
    assert found.fault.module == module


def test_a_pass_that_cannot_be_applied_is_named(monkeypatch: pytest.MonkeyPatch, saved: Callable[[str], Path]) -> None:
    def refuse(program: Program) -> Program:
        raise RewriterError("no such layer")

    _passes(saved("llama"), "ladder", 2)
    broken(monkeypatch, "ladder", refuse)
    found = bisected(saved("llama"), "ladder", 2)
    assert found.fault is not None
    assert found.fault.stage == "ladder"
    assert "no such layer" in found.fault.cause


def test_on_a_shrunken_copy_layers_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """tiny-llama has 6 layers, its copy 0, 1, 4 and 5: what is wrong in the copy's third layer is layer 4."""
    broken(monkeypatch, "merge_reductions", partial(faults.dropped, path=MLP.format(2), target=aten.silu.default))
    found = bisect_recipe(TINY_LLAMA, "ladder", tp=2)
    assert found.fault is not None
    assert (found.fault.stage, found.fault.layer, found.fault.module) == ("merge_reductions", 4, MLP.format(4))
    assert "-    silu_default = aten.silu(gate_proj)" in found.fault.difference
    assert "layers are 0, 1, 4, 5 of the model" in " ".join(found.notes)


def test_the_command_says_where_and_exits_with_3(
    monkeypatch: pytest.MonkeyPatch, saved: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved("llama")
    broken(monkeypatch, "ladder", partial(faults.reads, layer=3, place=0, value=6))
    words = ["bisect", str(path), "--recipe", "ladder", "--tp", "2", "--weights", "real"]
    assert main([*words, "--json"]) == 3
    data = json.loads(capsys.readouterr().out)
    assert data["fault"]["stage"] == "ladder"
    assert data["fault"]["layer"] == 3
    assert main(words) == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert "it reads add_5, which is not what it should read" in printed
    assert "-model_layers_3_post_attention_layernorm = " in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bisect nothing", "nothing: no such directory"),
        ("bisect {m}", "no rewrite.json in it"),
        ("bisect {m} --tp 2", "--tp, --sp and --set are for --recipe"),
        ("bisect {m} --recipe ladder --source {m}", "leave out --source"),
    ],
)
def test_what_cannot_be_bisected_is_refused(
    saved: Callable[[str], Path], capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert main(words.format(m=saved("llama")).split()) == 2
    assert message in capsys.readouterr().err


def test_values_are_read_as_ranks_may_hold_them() -> None:
    whole = torch.arange(24.0).reshape(4, 6) + 1
    assert difference((whole,), (whole,)) == 0
    assert difference((whole * 0.25, whole * 0.75), (whole,)) <= 1e-6  # summands
    assert difference((whole[:, :3], whole[:, 3:]), (whole,)) == 0  # slices
    assert difference((whole[:2], whole[:2], whole[2:], whole[2:]), (whole,)) == 0  # each on two ranks
    assert difference((whole, whole), (whole,), partial=False) == 0
    assert difference((whole * 0.25, whole * 0.75), (whole,), partial=False) > 0.1
    assert difference((whole[:, 3:], whole[:, :3]), (whole,)) > 0.1  # in the wrong order
    assert difference((whole.flatten(),), (whole,)) == 0
    assert difference((whole[:2],), (whole,)) == float("inf")
    assert difference((whole.flip(0),), (whole,)) > 0.1
    assert reordered((whole.flip(0),), (whole,), 1e-5)
    assert not reordered((whole.flip(0) * 1.1,), (whole,), 1e-5)
    assert difference((whole * torch.nan,), (whole,)) == float("inf")
