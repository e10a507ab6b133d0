"""Embeddings of n-grams: which modules are recorded over windows of tokens, and where their tables lie."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from rewriter.check.coverage.configs import small_config
from rewriter.common.model_class import auto_class
from rewriter.ir import Body, Leaf, Program, ops
from rewriter.passes.placement.rank_memory import memory
from rewriter.runtime import OffloadedEmbedding
from rewriter.runtime.loading import fill
from rewriter.tracing import trace
from rewriter.tracing.hashed_tokens import hashed_tokens

TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding.weight"


@pytest.fixture(scope="module")
def module() -> nn.Module:
    """A module that embeds n-grams, on meta."""
    config = small_config("qwen4_exp_text")
    with torch.device("meta"):
        model = auto_class(config).from_config(config, attn_implementation="eager")
    return next(m for m in model.modules() if type(m).__name__ == "Qwen4ExpTextNGramEmbedding")


@pytest.fixture(scope="module")
def program() -> Program:
    return trace(small_config("qwen4_exp_text"))


def test_a_module_is_recorded(module: nn.Module) -> None:
    assert [*hashed_tokens(module)] == [module]


@pytest.mark.parametrize("fault", ["_shift_right_ignore_eos", "eos_token_id"])
def test_a_module_that_reads_other_tokens_is_not(module: nn.Module, fault: str) -> None:
    other: Any = copy.copy(module)
    if fault == "eos_token_id":  # what its forward takes for it, and not what it says
        original = type(module).forward

        def forward(ids: torch.Tensor, cache: Any) -> torch.Tensor:
            changed = copy.copy(other)
            changed.eos_token_id += 1
            result: torch.Tensor = original(changed, ids, cache)
            return result

        other.forward = forward
    else:  # tokens of the sequence before, too
        other._shift_right_ignore_eos = lambda ids, shift: torch.roll(ids, shift, 1)
    assert not hashed_tokens(other)


def test_both_states_are_of_few_tokens(program: Program) -> None:
    """The ids of two tokens, and three values of the convolution, three tokens apart."""
    ple = program.modules["model.layers.1.ple"]
    assert isinstance(ple, Body)
    assert [n.kwargs["count"] for n in ple.graph.nodes if n.target is ops.preceded] == [2, 9]


def test_the_table_stays_with_the_host(program: Program) -> None:
    ple = program.modules["model.layers.1.ple"]
    assert isinstance(ple, Body)
    leaf = ple.modules["ple_embedding.ngram_embedding"]
    assert isinstance(leaf, Leaf)
    assert leaf.kind == "OffloadedEmbedding"
    held, table = memory(program), math.prod(program.parameters[TABLE].shape) * 4
    assert held.parameters - held.parameters_per_rank == table


class _Weights:
    """Weights in memory, read as those of a file."""

    path = "weights"

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {name: torch.ones(tensor.shape) for name, tensor in model.state_dict().items()}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.parameters[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.parameters[name].dtype

    def read(self, names: Any, device: Any, keep_quantized: bool = False) -> dict[str, torch.Tensor]:
        return {name: self.parameters[name].to(device) for name in names}


def test_a_table_is_loaded_on_the_host() -> None:
    with torch.device("meta"):
        model = nn.Sequential(OffloadedEmbedding(8, 4), nn.Linear(4, 4))
    weights: Any = _Weights(model)
    fill(model, weights, device="meta")  # in place of a GPU
    assert {name: p.device.type for name, p in model.named_parameters()} == {
        "0.weight": "cpu", "1.weight": "meta", "1.bias": "meta",
    }  # fmt: skip
    assert torch.equal(model[0](torch.tensor([[1, 2]])), torch.ones(1, 2, 4))
