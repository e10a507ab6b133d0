"""The emitted checkpoint trains: loss and gradients, checkpointing, LoRA, compilation, and saving what was trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import emitted
import oracles
import pytest
import torch
import zoo
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch import nn
from transformers import AutoModel, PreTrainedModel

TOLERANCE = 1e-5
LORA_TARGETS = {"gpt2": ["c_attn", "c_proj"], "gpt_neox": ["query_key_value", "dense"]}


def step(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of `ids` as its own labels and the gradient of every parameter that has one."""
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_step(
    actual: tuple[torch.Tensor, dict[str, torch.Tensor]], expected: tuple[torch.Tensor, dict[str, torch.Tensor]]
) -> None:
    assert oracles.relative_error(actual[0], expected[0]) <= TOLERANCE
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert oracles.relative_error(actual[1][name], gradient) <= 10 * TOLERANCE, name


STEPS = ("llama", "gpt2", "gpt_neox", "gemma2", "mixtral")  # the logits of all families are compared elsewhere


@pytest.mark.parametrize(
    "family", [*STEPS, *(pytest.param(f, marks=pytest.mark.slow) for f in zoo.FAMILIES if f not in STEPS)]
)
@pytest.mark.fast("llama", "gpt_neox")
def test_loss_and_gradients_equal_the_oracle(family: str) -> None:
    ids, original = zoo.batch(), zoo.build(family)
    standard = step(original, ids)
    with oracles.ladder_oracle(original, emitted.layers(family, "scattered")):
        expected = step(original, ids)
    assert abs(standard[0] - expected[0]) >= 1e-3
    assert_same_step(step(emitted.load(emitted.emitted(family, "scattered")), ids), expected)


@pytest.mark.parametrize(
    ("family", "reentrant"),
    [("llama", True), ("llama", False), ("gpt2", False), ("gpt_neox", True), ("mixtral", False)],
)
def test_gradient_checkpointing_changes_nothing(family: str, reentrant: bool) -> None:
    ids, model = zoo.batch(), emitted.load(emitted.emitted(family, "all"))
    model.train()  # the zoo's dropout probabilities are 0
    plain = step(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    child = next(emitted.layers_of(model)[1].children())
    child.register_forward_pre_hook(lambda module, args: calls.append(module))
    assert_same_step(step(model, ids), plain)
    assert len(calls) == 2  # it was recomputed


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
@pytest.mark.fast("gpt2", "llama")
def test_lora(family: str) -> None:
    ids, base = zoo.batch(), emitted.load(emitted.emitted(family, "upper-half"))
    with torch.no_grad():
        before = base(input_ids=ids).logits
    config = LoraConfig(r=4, target_modules=LORA_TARGETS.get(family, ["q_proj", "o_proj"]), task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, before)  # an adapter starts as nothing
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(6):
        loss, gradients = step(model, ids)
        assert gradients
        assert all("lora_" in name for name in gradients)
        losses.append(loss)
        optimizer.step()
    assert losses[-1] < losses[0] - 0.05
    model.eval()
    with torch.no_grad():
        adapted = model(input_ids=ids).logits
        merged = model.merge_and_unload()
        assert type(merged).__name__ == "Rewriter" + emitted.program(family).source.architecture
        assert oracles.relative_error(merged(input_ids=ids).logits, adapted) <= TOLERANCE
    assert oracles.relative_error(adapted, before) >= 1e-2


@pytest.mark.parametrize("family", ["llama_tied", "mixtral"])
def test_save_pretrained_round_trip(family: str, tmp_path: Path) -> None:
    """What was trained is saved under the names of the source's checkpoint, with its code, and loads again."""
    model = emitted.load(emitted.emitted(family, "scattered"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    model.save_pretrained(tmp_path / "trained")
    assert names_on_disk(tmp_path / "trained") == names_on_disk(emitted.source(family))
    again = emitted.load(tmp_path / "trained")
    assert type(again).__name__ == type(model).__name__
    assert_same_model(model, again)
    again.save_pretrained(tmp_path / "twice")
    assert_same_model(model, emitted.load(tmp_path / "twice"))
    base = emitted.load(tmp_path / "trained", AutoModel)
    ids = zoo.batch()
    with torch.no_grad():
        assert torch.equal(base(input_ids=ids)[0], model.base_model(input_ids=ids)[0])


def assert_same_model(first: PreTrainedModel, second: PreTrainedModel) -> None:
    theirs = dict(second.named_parameters())
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
    ids = zoo.batch()
    with torch.no_grad():
        assert torch.equal(first(input_ids=ids).logits, second(input_ids=ids).logits)


def names_on_disk(directory: Path) -> set[str]:
    names: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names |= set(tensors.keys())
    return names


@pytest.mark.parametrize("family", zoo.FAMILIES)
@pytest.mark.fast("llama", "gpt2", "gpt_neox", "qwen3_moe", "gemma2")
def test_nothing_is_missing_or_left_over_when_loading(family: str) -> None:
    """Mixtral's experts lie one by one on disk: without the source's conversion they would be random."""
    model, info = emitted.AutoModelForCausalLM.from_pretrained(
        emitted.emitted(family, "all"), trust_remote_code=True, output_loading_info=True
    )
    assert not any(info.values()), info
    expected = dict(zoo.shared(family).named_parameters())
    assert {n for n, _ in model.named_parameters()} == set(expected)
    assert all(torch.equal(p, expected[n]) for n, p in model.named_parameters())


COMPILED = ["llama", pytest.param("gpt2", marks=pytest.mark.slow), pytest.param("gemma2", marks=pytest.mark.slow)]


@pytest.mark.parametrize("family", COMPILED)
@pytest.mark.slow
def test_compiles_as_one_graph(family: str) -> None:
    """Forward and backward without a graph break. The loss is taken outside: GPT-2 logs in its own."""
    torch.compiler.reset()
    ids, model = zoo.batch(), emitted.load(emitted.emitted(family, "upper-half"))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    def step_outside(run: Callable[..., Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad(set_to_none=True)
        logits = run(input_ids=ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    plain = step_outside(model)
    assert len(plain[1]) == len(list(model.parameters()))
    assert_same_step(step_outside(compiled), plain)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen2"])
def test_compiles_with_inductor(family: str) -> None:
    torch.compiler.reset()
    ids, model = zoo.batch(), emitted.load(emitted.emitted(family, "scattered"), attn_implementation="sdpa")
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        logits = torch.compile(model, fullgraph=True)(input_ids=ids, use_cache=False).logits
    assert oracles.relative_error(logits, expected) <= TOLERANCE
