"""What layers hand on beside the stream: chosen keys, and keys and values in a mapping that all layers share."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from programs import tensor_parallel
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig

from rewriter.check.comparison import relative_error
from rewriter.check.random_model import build_model, random_ids, randomize
from rewriter.common.errors import RewriterError
from rewriter.ir import Body, Program, ops
from rewriter.ir.simulate import simulate
from rewriter.tracing import trace
from rewriter.tracing.handed_on import HandedOn
from rewriter.tracing.interception import Recorded
from rewriter.tracing.shared_values import SharedValues
from rewriter.tracing.shrink import shrink

pytestmark = pytest.mark.tracer


# --- layers run for what they hand on --------------------------------------------------------------------------------


class Stores(nn.Module):
    def forward(self, x: Tensor, shared: Any) -> tuple[Tensor, Any]:
        shared["keys"] = (x[..., :4],)
        return x, None


class Reads(nn.Module):
    def forward(self, x: Tensor, shared: Any) -> tuple[Tensor, Any]:
        return x, shared["keys"][0].long()


class Counts(nn.Module):
    def forward(self, x: Tensor, shared: Any) -> tuple[Tensor, Any]:
        return x, x[x.sum((1, 2)) > 0]


def found(handed: HandedOn, layer: nn.Module) -> Any:
    x = torch.empty(5, 37, 8, device="meta")
    return handed.find(layer, Recorded((x, SharedValues()), {}), lambda: type(layer))


def test_a_layer_reads_what_an_earlier_one_stored() -> None:
    handed = HandedOn((1,))
    assert found(handed, Stores()) == {1: None}
    assert found(handed, Stores()) == {1: None}  # alike: not run again
    assert found(handed, Reads()) == {1: (torch.Size([5, 37, 4]), torch.int64)}
    with pytest.raises(RewriterError, match=r"Reads cannot be run to find the values .*: KeyError: 'keys'"):
        found(HandedOn((1,)), Reads())


def test_without_readers_no_layer_is_run() -> None:
    assert found(HandedOn(), Reads()) == {}


def test_a_shape_that_values_decide_is_taken_as_its_widest() -> None:
    assert found(HandedOn((1,)), Counts()) == {1: (torch.Size([5, 37, 8]), torch.float32)}


# --- a model whose layers share both ---------------------------------------------------------------------------------


def config() -> PreTrainedConfig:
    """Three layers: the second reads what the first one stored and chose, the third has heads without rotation."""
    text = {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 3,
        "no_rope_layers": [1, 1, 0],
        "kv_source_layers": [0, 0, 2],
        "indexer_types": ["full", "shared", "full"],
    }
    return shrink(CONFIG_MAPPING["mistral_large4"](text_config=text), range(3), 2)


@functools.cache
def case() -> tuple[Any, Program, dict[str, Tensor]]:
    model = build_model(config())
    randomize(model)
    model.eval()
    weights = {n: t.detach() for n, t in (*model.named_buffers(), *model.named_parameters())}
    return model, trace(config()), weights


def attentions(program: Program) -> list[Body]:
    found = [m for name, m in program.modules.items() if name.endswith(".self_attn") and isinstance(m, Body)]
    assert len(found) == 3
    return found


@torch.no_grad()
def test_keys_that_were_chosen_and_values_that_were_stored_are_read_again() -> None:
    model, program, weights = case()
    ids = random_ids(config(), 21)
    expected = model(input_ids=ids, use_cache=False).logits
    assert relative_error(simulate(program, ids, weights=weights), expected) < 1e-5
    sharded = tensor_parallel(program, 2)
    assert relative_error(simulate(sharded, ids, weights=weights), expected) < 1e-4
    assert not any("replicated" in note for note in sharded.history[-1].notes)
    chooses = [any(n.target is ops.top_keys for n in body.graph.nodes) for body in attentions(program)]
    assert chooses == [True, False, True]


def test_heads_without_a_rotated_part_have_no_empty_pieces() -> None:
    values = [n.meta.get("val") for body in attentions(case()[1]) for n in body.graph.nodes]
    assert not [v for v in values if isinstance(v, Tensor) and v.numel() == 0]
