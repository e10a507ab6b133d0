"""Recurrent mixers over ranks: what ranks share, how packed projections are cut, and that a wrong cut shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hybrids
import pytest
import torch
from oracles import relative_error
from programs import tensor_parallel
from transformers import PreTrainedConfig, PreTrainedModel

from rewriter.check.coverage.check import shared_parameters
from rewriter.check.coverage.configs import small_config
from rewriter.check.random_model import build_model, randomize
from rewriter.common.errors import RewriterError
from rewriter.emit.module import emit_runtime_module
from rewriter.emit.module.layers import cache_slots
from rewriter.ir import Program, nodes_inside, ops
from rewriter.ir.simulate import simulate
from rewriter.ir.states import state_of
from rewriter.passes.placement.rank_memory import memory
from rewriter.tracing import mixer_forms, mixer_functions, trace


def error(program: Program, name: str) -> float:
    return error_of(program, hybrids.model(name))


@torch.no_grad()
def error_of(program: Program, model: PreTrainedModel) -> float:
    """Of the logits of 70 tokens on all ranks, by those of the unmodified model."""
    ids = torch.randint(3, 100, (2, 70), generator=torch.Generator().manual_seed(3))
    expected = model(input_ids=ids, use_cache=False).logits
    return relative_error(simulate(program, ids, weights=hybrids.weights_of(model)), expected)


@pytest.mark.parametrize("name", [*hybrids.TYPES, "minimax", "recurrent_gemma", "zamba", "zaya"])
@pytest.mark.fast("nemotron_h", "falcon_h1")
def test_ranks_share_nearly_all_parameters_of_layers(name: str) -> None:
    sharded = tensor_parallel(hybrids.traced(name), 2)
    shared = shared_parameters(sharded, 2)
    assert shared is not None
    assert shared >= 0.95
    assert not sharded.history[-1].notes  # nothing is replicated


def cuts(program: Program, parameter: str) -> tuple[tuple[tuple[int, int], ...], ...]:
    found = program.parameters[parameter].ranges
    assert found is not None
    return found


def test_parts_of_packed_projections_are_cut_one_by_one() -> None:
    """Mamba 2's z, x, B, C and dt side by side; its convolution has x, B and C."""
    name = "nemotron_h"
    config = hybrids.traced(name).source.config
    inner, groups = config["mamba_num_heads"] * config["mamba_head_dim"], config["n_groups"] * config["ssm_state_size"]
    parts = [inner, inner, groups, groups, config["mamba_num_heads"]]
    sharded = tensor_parallel(hybrids.traced(name), 2)
    begins = [sum(parts[:i]) for i in range(5)]
    for rank, runs in enumerate(cuts(sharded, "model.layers.0.mixer.in_proj.weight")):
        own = {i for begin, end in runs for i in range(begin, end)}
        halves = (
            (begin + rank * size // 2, begin + (rank + 1) * size // 2)
            for begin, size in zip(begins, parts, strict=True)
        )
        assert own == {i for begin, end in halves for i in range(begin, end)}
    taps = cuts(sharded, "model.layers.0.mixer.conv1d.weight")
    assert sum(end - begin for begin, end in taps[0]) == (inner + 2 * groups) // 2


def exchanged(program: Program, parameter: str) -> Program:
    """`program` whose ranks have exchanged the last part of a packed projection."""
    spec = program.parameters[parameter]
    assert spec.ranges is not None
    (*first, one), (*second, other) = spec.ranges
    changed = replace(spec, ranges=((*first, other), (*second, one)))
    return program.with_(parameters={**program.parameters, parameter: changed})


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("nemotron_h", "model.layers.0.mixer.in_proj.weight"),
        ("nemotron_h", "model.layers.0.mixer.conv1d.weight"),
        ("lfm2_moe", "model.layers.0.conv.in_proj.weight"),
        ("minimax", "model.layers.1.self_attn.slope_rate"),
        ("zamba", "model.layers.2.mamba_decoder.mamba.x_proj_weight"),
        ("inkling_text", "model.layers.0.self_attn.r_proj.weight"),
        ("doge", "model.layers.0.self_attn.dt_proj.weight"),
        ("doge", "model.layers.0.self_attn.A"),
        ("zaya", "model.layers.1.self_attn.qkv_proj.conv_qk_depthwise.weight"),
        ("zaya", "model.layers.1.self_attn.qkv_proj.conv_qk_grouped.weight"),
    ],
)
@pytest.mark.fast(
    "nemotron_h-model.layers.0.mixer.in_proj.weight",
    "nemotron_h-model.layers.0.mixer.conv1d.weight",
    "lfm2_moe-model.layers.0.conv.in_proj.weight",
    "doge-model.layers.0.self_attn.dt_proj.weight",
)
def test_an_exchanged_part_of_a_parameter_shows(name: str, parameter: str) -> None:
    sharded = tensor_parallel(hybrids.traced(name), 2)
    assert error(sharded, name) <= 1e-4
    assert error(exchanged(sharded, parameter), name) >= 1e-3


def test_of_heads_that_ranks_hold_together_each_sums_a_part() -> None:
    """Doge's biases of keys are projected from all values: two key/value heads, on four ranks."""
    sharded = tensor_parallel(hybrids.traced("doge"), 4)
    assert not sharded.history[-1].notes
    assert error(sharded, "doge") <= 1e-4
    name, width = "model.layers.0.self_attn.dt_proj.weight", hybrids.traced("doge").source.config["hidden_size"] // 8
    assert cuts(sharded, name) == tuple(((rank * width, (rank + 1) * width),) for rank in range(4))
    slots = cache_slots(sharded.modules["model.layers.0.self_attn"])
    assert slots == ["SlotSpec(1, 1, 0)", "SlotSpec(1, 16, 16)"]  # the bias of a rank's head, and its keys and values


def test_states_are_a_rank_s_own() -> None:
    whole, sharded = hybrids.traced("nemotron_h"), tensor_parallel(hybrids.traced("nemotron_h"), 2)
    for program, ranks in ((whole, 1), (sharded, 2)):
        nodes = [n for _, n in nodes_inside(program.modules["model.layers.0.mixer"]) if n.target in ops.RECURRENT]
        convolution, recurrence = map(state_of, nodes)
        heads, size = whole.source.config["mamba_num_heads"] // ranks, whole.source.config["mamba_head_dim"]
        assert recurrence.shape == (heads, size, whole.source.config["ssm_state_size"])
        assert (convolution.shape[1], convolution.fp32, recurrence.fp32) == (3, False, True)
    assert memory(sharded).states_per_row * 2 == memory(whole).states_per_row > 0


def delta_nets() -> PreTrainedConfig:
    """Layers of one kind, which has fewer key heads than value heads."""
    return small_config("qwen3_5_text", {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2})


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> PreTrainedConfig:
    """A config whose model repeats its key heads for the value heads before the delta rule, as transformers 5.17's."""
    known = mixer_functions._LIFTED["torch_chunk_gated_delta_rule"]

    def repeating(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any) -> Any:
        query, key = (x.repeat_interleave(value.shape[2] // x.shape[2], 2) for x in (query, key))
        return known(query, key, value, *rest, **options)

    monkeypatch.setitem(mixer_functions._LIFTED, "torch_chunk_gated_delta_rule", repeating)
    config = delta_nets()
    assert config.linear_num_value_heads > config.linear_num_key_heads
    return config


@pytest.fixture
def as_it_is() -> str:
    """The runtime module of the model that does not repeat them."""
    return emit_runtime_module(trace(delta_nets()))


@pytest.mark.tracer
def test_key_heads_that_a_model_repeats_are_read_as_they_are(as_it_is: str, repeated: PreTrainedConfig) -> None:
    assert emit_runtime_module(trace(repeated)) == as_it_is


@pytest.mark.tracer
def test_repeated_heads_of_a_whole_value_are_not_taken_for_a_rank_s_own(
    repeated: PreTrainedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixer_forms, "_GROUPS", {})
    sharded = tensor_parallel(trace(repeated), 2)
    assert any("repeats heads or channels that each rank has all of" in note for note in sharded.history[-1].notes)
    model = build_model(repeated)
    randomize(model, 0.5)
    assert error_of(sharded, model) <= 1e-4


def test_groups_that_do_not_come_out_even_are_replicated_and_named() -> None:
    whole: Any = hybrids.traced("nemotron_h")
    sharded = tensor_parallel(whole, 8)
    assert any("mixer" in note and "replicated" in note for note in sharded.history[-1].notes)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(RewriterError, match=r"--tp 3: \d+ query heads do not divide by 3"):
        tensor_parallel(hybrids.traced("nemotron_h"), 3)
