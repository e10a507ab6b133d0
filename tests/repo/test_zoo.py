"""Properties that make the zoo a test bench: sensitive to every parameter, well conditioned, free of near ties."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from oracles import greedy_oracle, ladder_logits, layers_of, relative_error
from safetensors import safe_open
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM


class InDouble(TorchFunctionMode):
    """Every request for float32 means float64: Hugging Face's norms, softmaxes and routers ask for it by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {name: torch.float64 if v is torch.float32 else v for name, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_float32_is_ten_times_more_exact_than_the_tests_demand(family: str) -> None:
    single, double = zoo.shared(family), zoo.build(family, dtype=torch.float64)
    ids = zoo.batch(2, 100, single.config.vocab_size)
    for layers in (set(), set(range(len(layers_of(single))))):
        with InDouble():
            exact = ladder_logits(double, layers, ids)
        assert exact.dtype == torch.float64
        assert relative_error(ladder_logits(single, layers, ids), exact) <= 1e-6


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_every_parameter_shows_in_the_logits(family: str) -> None:
    """Rolled by one place, each parameter changes the logits: none may be lost, exchanged or left at its default."""
    model = zoo.build(family)
    ids = torch.arange(2, 42)[None]
    expected = ladder_logits(model, set(), ids)
    for name, parameter in model.named_parameters():
        kept = parameter.data
        parameter.data = kept.roll(1, dims=-1)
        assert relative_error(ladder_logits(model, set(), ids), expected) >= 1e-3, name
        parameter.data = kept


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text"])
def test_windows_end_inside_the_shortest_test(family: str) -> None:
    model = zoo.build(family)
    ids = zoo.batch(2, 21, model.config.vocab_size)
    expected = ladder_logits(model, set(), ids)
    config = model.config
    config.sliding_window += 1
    wider = type(model)._from_config(config, attn_implementation="eager")
    wider.load_state_dict(model.state_dict())
    assert relative_error(ladder_logits(wider.eval(), set(), ids), expected) >= 1e-2


@pytest.mark.parametrize(
    ("family", "selection"),
    [
        pytest.param(family, selection, marks=() if selection == "all" else pytest.mark.slow)
        for family in zoo.FAMILIES
        for selection in zoo.selections(4)
    ],
)
@pytest.mark.slow
def test_no_choice_of_the_long_texts_is_closer_than_rounding(family: str, selection: str) -> None:
    """Over 64 greedy tokens of 8 prompts, neither the best token nor the last chosen expert is a near tie.

    And the texts move: a model that repeats one token would hide wrong positions and caches.
    """
    model = zoo.shared(family)
    layers = zoo.selections(len(layers_of(model)))[selection]
    prompts = zoo.prompts(8, model.config.vocab_size)
    texts = greedy_oracle(lambda ids: ladder_logits(model, layers, ids), prompts, 64)
    ties: list[float] = []

    def record(router: Any, _: Any, output: Any) -> None:
        ranked = output[0].sort(-1, descending=True).values
        ties.append(float((ranked[:, router.top_k - 1] - ranked[:, router.top_k]).min() / ranked.std()))

    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    handles = [router.register_forward_hook(record) for router in routers]
    for prompt, text in zip(prompts, texts, strict=True):
        logits = ladder_logits(model, layers, torch.tensor([prompt + text]))[0, len(prompt) - 1 : -1]
        best, second = logits.topk(2).values.unbind(-1)
        ties.append(float((best - second).min() / logits.abs().max()))
    for handle in handles:
        handle.remove()
    assert min(ties) >= 1e-5
    assert bool(routers) == ("moe" in family or family == "mixtral")
    assert sum(len(set(text)) for text in texts) >= 8 * 8


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_a_saved_model_loads_as_the_same_model(family: str, tmp_path: Path) -> None:
    model = zoo.save(family, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32).eval()
    ids = zoo.batch(2, 21, model.config.vocab_size)
    assert relative_error(ladder_logits(loaded, set(), ids), ladder_logits(model, set(), ids)) <= 2e-6
    assert (tmp_path / "generation_config.json").exists()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == model.config.model_type


def test_mixtral_lies_on_disk_expert_by_expert(tmp_path: Path) -> None:
    zoo.save("mixtral", tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in names
    assert not any(name.endswith("gate_up_proj") for name in names)


def test_weights_depend_on_the_seed_and_leave_the_callers_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = zoo.build("gpt2"), zoo.build("gpt2"), zoo.build("gpt2", seed=1)
    assert torch.equal(torch.rand(3), expected)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c), name


def test_prompts_are_distinct_and_of_different_lengths() -> None:
    for vocab in (256, 259, 320):
        prompts = zoo.prompts(8, vocab)
        assert len({len(prompt) for prompt in prompts}) == len(prompts) == 8
        assert all(len(set(prompt)) == len(prompt) >= 16 for prompt in prompts)
        assert all(1 < token < vocab for prompt in prompts for token in prompt)
