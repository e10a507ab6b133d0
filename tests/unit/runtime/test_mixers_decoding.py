"""Generation of models whose layers hold several states: eager, compiled, and by compiled parts, each token that of the
full sequence; and graphs of mixers that do not depend on how long a sequence is."""

from __future__ import annotations

import functools
import json
import shutil

import pytest
import runtime_mixers
import torch
import traced_worker
from mixer_cases import BATCH, CASES, SPECS
from safetensors.torch import save_file
from torch._dynamo.utils import counters

import rewriter.runtime as runtime
from rewriter.runtime import Context, StaticCache, compile_segments, generate, load
from rewriter.runtime.compiled import segments_of
from rewriter.runtime.generation import cached_step, step_cache
from rewriter.runtime.generation.decode_step import DecodeStep, decode_step

PROMPTS = [[5, 9, 3, 44, 21], [7, 8, 30, 2, 51, 11, 13, 4, 40]]
COUNT = 12


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs():
    return counters["stats"]["unique_graphs"]


def expected(prompts, count=COUNT, of_each=2):
    """Each prompt alone, every token by its whole sequence from zeros."""
    return [list(alone(tuple(prompt), of_each, count)) for prompt in prompts]


@functools.cache
@torch.no_grad()
def alone(prompt, of_each, count):
    model, row = runtime_mixers.build(of_each=of_each), list(prompt)
    for _ in range(count):
        row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
    return row[len(prompt) :]


def test_padded_prompts_in_pieces_generate_what_they_do_alone():
    model, wanted = runtime_mixers.build(), expected(PROMPTS)
    assert len({tuple(row) for row in wanted}) == 2
    assert max(len(set(row)) for row in wanted) > 4, "the tokens of a loop would say little"
    assert generate(model, PROMPTS, COUNT) == wanted
    assert generate(model, [PROMPTS[0]], COUNT) == wanted[:1], "after another generation"
    for chunk in (1, 3):
        step = DecodeStep(model, 2, 40)
        longest = len(PROMPTS[1])
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in PROMPTS])
        step.begin(longest, torch.tensor([longest - len(row) for row in PROMPTS]), step.sampling, 0, (), 0)
        step.prefill(ids, chunk)
        with torch.no_grad():
            for _ in range(COUNT):
                step.run()
        assert step.produced[:COUNT].T.tolist() == wanted


def test_slots_that_two_layers_share_are_seen():
    model = runtime_mixers.build()
    model.layers[3].linear_attn.slot = model.layers[0].linear_attn.slot
    assert generate(model, PROMPTS, COUNT) != expected(PROMPTS)


@pytest.mark.slow
def test_layers_with_several_states_share_their_graphs():
    model, wanted = runtime_mixers.build(), expected(PROMPTS)
    slots = {part.path: part.slots for part in segments_of(model)}
    assert [slots[f"layers.{i}"] for i in range(4)] == [(0, 1), (2, 3, 4), (5, 6, 7), (8, 9)]
    compile_segments(model, backend="eager")
    assert generate(model, PROMPTS, 3) == [row[:3] for row in wanted]
    assert [layer.linear_attn.slot for layer in model.layers if hasattr(layer, "linear_attn")] == [0, 8]
    first = graphs()
    for prompts in (PROMPTS, [row * 9 for row in PROMPTS]):
        assert generate(model, prompts, 5) == expected(prompts, 5)
    assert graphs() <= first + 1, "a layer, a token or a prompt was compiled on its own"  # + a step for longer caches
    assert not counters["graph_break"]


def test_a_step_that_is_compiled_or_captured_counts_once(monkeypatch):
    """It runs before it is used, which must leave states as they were."""
    model, wanted = runtime_mixers.build(of_each=1), expected(PROMPTS, of_each=1)
    compile_segments(model, backend="eager")
    assert generate(model, PROMPTS, COUNT) == wanted
    assert decode_step(model, 2, 21, None).how == "compiled"

    def capture(steps, changed, random, group):
        saved = [x.clone() for x in changed]
        for step in steps:
            step()
        for x, before in zip(changed, saved, strict=True):
            x.copy_(before)
        return steps

    model = runtime_mixers.build(of_each=1)
    monkeypatch.setattr(f"{DecodeStep.__module__}.host_waits", lambda x: True)
    monkeypatch.setattr(f"{DecodeStep.__module__}.capture", capture)
    assert generate(model, PROMPTS, COUNT) == wanted
    assert decode_step(model, 2, 21, None).how == "captured"
    monkeypatch.setattr(StaticCache, "states", ())
    assert generate(runtime_mixers.build(of_each=1), PROMPTS, COUNT) != wanted
    monkeypatch.undo()
    monkeypatch.setattr(StaticCache, "states", ())
    model = runtime_mixers.build(of_each=1)
    compile_segments(model, backend="eager")
    assert generate(model, PROMPTS, COUNT) != wanted


def test_compiled_parts_hold_their_states(tmp_path, monkeypatch):
    """The real process that compiles them, without Inductor and the C++ compiler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(step_cache, "WORKER", [traced_worker.SCRIPT])
    monkeypatch.setattr(cached_step, "_loaded", traced_worker.loaded)
    folder = tmp_path / "out" / "runtime" / "tp1"
    folder.mkdir(parents=True)
    shutil.copy(runtime_mixers.__file__, folder / "module.py")
    save_file(runtime_mixers.weights(), tmp_path / "out" / "rank-0.safetensors")
    entry = {"module": "runtime/tp1/module.py", "class": "Model", "ranks": ["rank-0.safetensors"]}
    (tmp_path / "out" / "rewrite.json").write_text(json.dumps({"mesh": {"tp": 1}, "runtime": {"tp1": entry}}))
    model = load(tmp_path / "out", dtype=torch.float64)
    cached_step.compile_steps(model, "first")
    assert generate(model, PROMPTS, COUNT) == expected(PROMPTS)
    assert decode_step(model, 2, 21, None).how == "compiled parts"
    compiled = json.loads(next(path for path in (tmp_path / "cache").rglob("*.json")).read_text())["parts"]
    assert len(compiled) == 7  # layers and the head
    assert len({file for file, _ in compiled.values()}) == 4


@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[6], CASES[8], CASES[11], CASES[14]], ids=lambda c: c.name)
@pytest.mark.fast("causal_conv", "delta_rule0", "linear_scan")
def test_one_graph_serves_every_length(case):
    """With gradients, and without recurrences that are unrolled."""

    def run(*inputs):
        return getattr(runtime, case.name)(*inputs, Context(), slot=0, **case.options)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (70, 9, 140):
        ours, theirs = ([x.requires_grad_() for x in case.inputs(length)] for _ in range(2))
        for function, inputs in ((compiled, ours), (run, theirs)):
            function(*inputs).square().sum().backward()
        torch.testing.assert_close([x.grad for x in ours], [x.grad for x in theirs])
    assert graphs() == 1


@pytest.mark.parametrize("states", [False, True])
def test_operators_keep_to_what_they_declare(states):
    def state(name):
        return torch.rand(BATCH, *SPECS[name].shape, dtype=torch.float64) if states else None

    for case in (CASES[3], CASES[6]):
        given = *case.inputs(70), state("delta_rule"), True, 0.4, True
        torch.library.opcheck(torch.ops.rewriter.delta_rule.default, given)
    given = *CASES[8].inputs(70), state("state_space"), True, 0.0, 9.0
    torch.library.opcheck(torch.ops.rewriter.state_space.default, given)
    *inputs, _, _, bias = CASES[11].inputs(70)
    torch.library.opcheck(torch.ops.rewriter.selective_scan.default, (*inputs, bias, state("selective_scan"), True))
    torch.library.opcheck(torch.ops.rewriter.linear_scan.default, (*CASES[14].inputs(70), state("linear_scan")))
