"""quantize_collectives over "sp": simulated ranks against the unmodified model whose attention gets dequantized keys
and values, on any grid; what is written, computed by real ranks, and refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from oracles import relative_error
from programs import traced, weights
from repository import TINY_LLAMA
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.llama import modeling_llama

from rewriter import api
from rewriter.common.errors import RewriterError
from rewriter.explain.inspection import sequence
from rewriter.ir import Program
from rewriter.ir.simulate import simulate
from rewriter.kernels import dequantize, quantize
from rewriter.passes import available
from rewriter.passes.phases import single_device
from rewriter.passes.quantize_collectives import QuantizeCollectives, always_quantized, exact, is_quantized
from rewriter.passes.sequence.sequence_plans import bytes_per_token, sequence_plan

SAME = 1e-10  # of logits in fp64, relative to the largest


def wired(ranks: int, *steps: dict[str, Any], family: str = "llama", **sharding: Any) -> Program:
    program = traced(family).with_(mesh={"sp": ranks, "tp": 1})
    program = available()["sequence_parallel"](**sharding).apply(program)
    for options in steps:
        program = QuantizeCollectives(**{"axis": "sp", "min_bytes": 0, **options}).apply(program)
    return program


@contextmanager
def dequantized_keys(model: nn.Module, format: str) -> Iterator[None]:
    """Within it, attention of the model computes with k and v of which each vector was quantized by itself."""

    def read(x: Tensor) -> Tensor:
        rows = x.float().reshape(-1, x.shape[-1])
        found = torch.stack([dequantize(quantize(row, format), format, row.shape, row.dtype) for row in rows])
        return found.view(x.shape).to(x.dtype)

    def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
        return modeling_llama.eager_attention_forward(module, q, read(k), read(v), *rest, **options)

    AttentionInterface.register("dequantized_keys", attention)
    before, model.config._attn_implementation = model.config._attn_implementation, "dequantized_keys"
    try:
        yield
    finally:
        model.config._attn_implementation = before


def ids(length: int) -> Tensor:
    return zoo.batch(2, length, zoo.shared("llama").config.vocab_size)


def original(length: int, format: str | None = None) -> Tensor:
    model = copy.deepcopy(zoo.shared("llama")).double()
    t = torch.arange(length)
    mask = torch.zeros(length, length, dtype=torch.float64).masked_fill(t[None] > t[:, None], -torch.inf)
    given = {"input_ids": ids(length), "attention_mask": mask[None, None], "use_cache": False}
    with torch.no_grad():
        if format is None:
            return model(**given).logits
        with dequantized_keys(model, format):
            return model(**given).logits


@torch.no_grad()
def simulated(program: Program, length: int) -> Tensor:
    return simulate(program, ids(length), weights={n: t.double() for n, t in weights("llama").items()})


@pytest.mark.parametrize("format", ["int8@16", "fp8@16", "int4@16"])
def test_simulated_ranks_equal_the_model_with_dequantized_keys_on_any_grid(format: str) -> None:
    expected = original(21, format)
    assert relative_error(expected, original(21)) > 1e-4
    for ranks, options in (
        (2, {"kind": "ring"}),
        (4, {"kind": "attention2d", "grid": (1, 2, 2)}),
        (2, {"kind": "ulysses"}),
    ):
        assert relative_error(simulated(wired(ranks, {"format": format}, **options), 21), expected) <= SAME, options


def test_min_bytes_counts_what_a_rank_holds() -> None:
    shape = zoo.shared("llama").config
    held = 2 * 6 * shape.num_key_value_heads * 2 * (shape.hidden_size // shape.num_attention_heads) * 8
    at, above = (wired(4, {"format": "int8@16", "min_bytes": held + more}, kind="ring") for more in (0, 1))
    # 21 tokens on a ring of 4 are 6 on each rank
    assert relative_error(simulated(at, 21), original(21, "int8@16")) <= SAME
    assert relative_error(simulated(above, 21), original(21)) <= SAME


def test_the_plan_says_it_and_prices_it() -> None:
    exactly, program = (wired(4, *steps, kind="ring") for steps in ((), ({"format": "int8@16", "min_bytes": 64},)))
    plan = sequence_plan(program)
    assert str(plan) == "ring 1×4×1 overlapped, keys and values int8@16 from 64 bytes"
    assert str(plan) in program.text()
    assert "keys and values travel as int8@16 where a rank has 64 bytes of them or more" in program.history[-1].summary
    plain, less = (bytes_per_token(p)["forward"]["kv"] for p in (exactly, program))
    assert less * 32 == plain * 18  # fp32: of 8 elements 32 bytes; filled up to a block of 16 and quantized 18
    table = sequence(program, 4, None)
    assert table["applied"]
    assert sum(row["chosen"] for row in table["plans"]) == 1
    assert "Keys and values travel as int8@16 where a rank has 64 bytes of them" in table["notes"][0]


def test_quantization_is_taken_out_and_made_complete() -> None:
    steps = [(), ({"format": "int8@16", "min_bytes": 64},), ({"format": "int8@16"},)]
    plain, some, everything = (wired(2, *chosen, kind="ring") for chosen in steps)
    assert [is_quantized(p) for p in (plain, some)] == [False, True]
    for made, same in ((exact(some), plain), (always_quantized(some), everything)):
        assert made.with_(history=()).text() == same.with_(history=()).text()
    assert single_device(some).fingerprint() == traced("llama").with_(mesh={}).fingerprint()


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([{"format": "int8@16"}, {"format": "int4@16"}], r"keys and values are quantized already \(int8@16\)"),
        ([{"format": "int4-hadamard"}], r"longer than a head's vector of 8 elements.*Give int4-hadamard@16$"),
    ],
)
def test_what_cannot_be_quantized_is_refused(steps: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(RewriterError, match=reason):
        wired(2, *steps, kind="ring")


def test_it_needs_sharded_tokens() -> None:
    program = traced("llama")
    with pytest.raises(RewriterError, match=r"one rank sends nothing\. Give --sp 2"):
        QuantizeCollectives("int8", "sp").apply(program)
    with pytest.raises(RewriterError, match="Put sequence_parallel before it"):
        QuantizeCollectives("int8", "sp").apply(program.with_(mesh={"sp": 2, "tp": 1}))


# --- what is written ---

RECIPE = """\
name: ring-int8
summary: A ring whose keys and values travel as int8.
paper: a test
passes:
  - pass: sequence_parallel
    kind: ring
  - pass: quantize_collectives
    axis: sp
    format: int8@16
    min_bytes: 100
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    (folder / "ring.yaml").write_text(RECIPE)
    api.convert(TINY_LLAMA, str(folder / "ring.yaml"), out=folder / "out", sp=2, options=api.SaveOptions(verify="none"))
    return folder / "out"


def test_the_output_says_that_keys_are_quantized(written: Path) -> None:
    plan = json.loads((written / "rewrite.json").read_text())["runtime"]["sp2"]["sequence"]
    assert (plan["quantized"], plan["min_bytes"]) == ("int8@16", 100)
    source = (written / "runtime/sp2/module.py").read_text()
    assert 'SequencePlan("ring", (1, 2, 1), overlap=True, quantized="int8@16", min_bytes=100)' in source
    card = " ".join((written / "README.md").read_text().split())
    assert "attention reads all of them" in card
    assert "Keys and values travel as `int8@16`, where a rank has 100 bytes of them in a layer or more," in card


@pytest.mark.slow
def test_real_ranks_compute_what_is_simulated(written: Path) -> None:
    """A conversion's own checks: what is written, loaded and run on ranks, against the simulation."""
    out = written.with_name("verified")
    api.convert(TINY_LLAMA, str(written.with_name("ring.yaml")), out=out, sp=2, options=api.SaveOptions(verify="full"))
    checks = json.loads((out / "rewrite.json").read_text())["verification"]["checks"]
    found = [c for c in checks if c["name"].endswith("sharded module on 2 ranks, quantized = simulated")]
    assert len(found) == 2, "a small copy and the real weights"
