"""Annealed models in training: checkpointing, compilation, dtypes, the directory to train from, and the schedule."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import emitted
import oracles
import pytest
import torch
import zoo
from safetensors.torch import load_file
from test_annealing import ROUNDING, annealed_model, at, gradients, own_model, program
from torch._dynamo.testing import CompileCounter

from rewriter.adapt.anneal_schedule import Annealing, annealed_layers, set_annealing
from rewriter.common.errors import RewriterError
from rewriter.emit.annealed import write_annealed
from rewriter.emit.huggingface import emit_huggingface

# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_recomputes_at_the_same_lambda(reentrant: bool) -> None:
    model = own_model("llama", "ladder").train()
    set_annealing(model, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0})
    expected = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize(("family", "recipe"), [("gpt2", "ladder"), ("mixtral", "2x")], ids=str)
def test_what_was_trained_loads_in_the_shipped_file(family: str, recipe: str, tmp_path: Path) -> None:
    """Between the ends nothing of λ is saved; names on disk are the source's."""
    model = own_model(family, recipe)
    set_annealing(model, dict.fromkeys(annealed_layers(model), 0.5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    model.save_pretrained(tmp_path / "trained")
    saved, source = (load_file(d / "model.safetensors").keys() for d in (tmp_path / "trained", emitted.source(family)))
    assert saved == source
    emitted.write(emit_huggingface(program(family, recipe)), tmp_path / "trained", tmp_path / "shipped")
    with torch.no_grad():
        shipped = emitted.load(tmp_path / "shipped")(input_ids=zoo.batch(), use_cache=False).logits
    assert torch.equal(shipped, at(model, 1.0))
    again = emitted.load(tmp_path / "trained")
    assert {layer.annealing for layer in annealed_layers(again).values()} == {1.0}


def test_a_layer_whose_lambda_changes_is_compiled_twice() -> None:
    """For the first number, and once more for any: not for every step."""
    torch.compiler.reset()
    model, counter = own_model("llama", "upper-half"), CompileCounter()
    annealed_layers(model)[3].compile(backend=counter, fullgraph=True)
    for step in range(8):
        values = Annealing(6, (2, 3)).at(step)
        assert oracles.relative_error(at(model, values), at(annealed_model("llama", "upper-half"), values)) <= ROUNDING
    torch.compiler.reset()
    assert counter.frame_count == 2


def test_in_bfloat16_the_ends_are_exact_too() -> None:
    model = own_model("llama", "ladder", dtype=torch.bfloat16)
    eager = emitted.load(emitted.source("llama"), dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(at(model, 0.0), eager(input_ids=zoo.batch(), use_cache=False).logits)


def test_the_directory_to_train_from_links_weights_and_keeps_their_dtype(tmp_path: Path) -> None:
    """Of an output directory, nothing else that is about the shipped file comes along."""
    weights = tmp_path / "DIR"
    for folder in ("runtime", "verification"):
        (weights / folder).mkdir(parents=True)
    (weights / "config.json").write_text('{"dtype": "bfloat16"}')
    for name in (
        "model.safetensors",
        "tokenizer.json",
        "golden.safetensors",
        "modeling_rewriter_llama.py",
        "README.md",
    ):
        (weights / name).write_text(name)
    write_annealed(program("llama", "ladder"), weights, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json", "model.safetensors", "modeling_rewriter_llama.py", "tokenizer.json",
    ]  # fmt: skip
    assert (tmp_path / "out/model.safetensors").resolve() == weights / "model.safetensors"
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert "self.annealing" in (tmp_path / "out/modeling_rewriter_llama.py").read_text()


def test_the_annealed_file_is_formatted_and_checked(tmp_path: Path) -> None:
    for name in ("upper-half", "parallel", "4x-sum"):
        files = emit_huggingface(program("llama", name), annealed=True)
        (tmp_path / f"{name}.py").write_text(files.modeling)
        rewired = {kind for kind in files.config["rewriter_layers"] if not kind.startswith("standard")}
        kept = {"keep"} & rewired  # a layer whose reductions are all kept
        assert files.modeling.count("    annealing = 1.0\n") == len(rewired - kept)
    emitted.assert_clean(tmp_path)


# --- the schedule ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "count"), [(1, 1), (7, 3), (10, 4), (3, 8), (1000, 6)])
def test_every_layer_rises_from_0_to_exactly_1(steps: int, count: int) -> None:
    schedule = Annealing(steps, tuple(range(2, 2 + count)))
    assert 0.0 < schedule.at(0)[2] == 1 / (steps + 1)
    for step in (steps, steps + 1, 10 * steps):
        assert schedule.at(step) == dict.fromkeys(range(2, 2 + count), 1.0)
    values = [schedule.at(step) for step in range(steps + 1)]
    for earlier, later in itertools.pairwise(values):
        assert all(0.0 <= earlier[layer] <= later[layer] for layer in earlier)
        assert sum(later.values()) - sum(earlier.values()) == pytest.approx(count / (steps + 1))


@pytest.mark.parametrize(
    ("options", "message"), [({"steps": 0, "layers": (1,)}, "steps=0"), ({"steps": 1, "layers": ()}, "no layer")]
)
def test_a_schedule_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RewriterError, match=message):
        Annealing(**options)
