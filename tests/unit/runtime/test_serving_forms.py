"""Schedules and the forms of layers, which the vLLM plugin reads, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rewriter.output.sum_schedule import Sum, Unsupported, schedule_of
from rewriter.runtime.serving.vllm.layer_form import Given, form_of

FP32 = torch.float32


def sums(delays, cuts=(), mergeable=True, **others):
    config = SimpleNamespace(rewriter_delays=delays, **others)
    return [[step.sum.value for step in layer] for layer in schedule_of(config, cuts, mergeable).layers]


def config_of(delays, pattern, modes, **others):
    return SimpleNamespace(rewriter_delays=delays, rewriter_pattern=pattern, rewriter_modes=modes, **others)


SCHEDULES = {
    "a standard model keeps its sums inside": ([[0, 0], [0, 0]], {}, [["inside", "inside"]] * 2),
    "a ladder begins, steps and drains": ([[0, 1], [1, 1]], {}, [["begin", "step"], ["step", "drain"]]),
    "standard layers around one": (
        [[0, 0], [1, 1], [0, 0]], {}, [["inside", "begin"], ["step", "drain"], ["inside", "inside"]],
    ),
    "a parallel layer sums once": ([[0, 1], [0, 1]], {}, [["hold", "both"]] * 2),
    "but not where more than numbers follow": ([[0, 1], [0, 1]], {"mergeable": False}, [["begin", "drain"]] * 2),
    "what is under way ends with a pipeline stage": (
        [[0, 1], [1, 1], [1, 1]], {"cuts": [0]}, [["hold", "both"], ["begin", "step"], ["step", "drain"]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SCHEDULES)
def test_sums_follow_from_delays(case):
    delays, options, expected = SCHEDULES[case]
    assert sums(delays, **options) == expected


def test_desynced_blocks_are_as_the_pattern_says():
    pattern = [{"self_attn": "drop", "mlp": "keep_sum"}, {"self_attn": "standard", "mlp": "standard"}]
    modes = {"drop": {"sum": "left_out"}, "keep_sum": {"sum": "all_since"}, "standard": {}}
    found = schedule_of(config_of([[0, 0]] * 2, pattern, modes, rewriter_ranks=2))
    assert [step.sum for step in found.layers[0]] == [Sum.DROP, Sum.RESYNC_SUM]
    assert (found.ranks, found.overlapped, found.summed) == (2, 0, 3)


def test_own_partials_are_read_where_the_sum_is_late():
    pattern, modes = [{"self_attn": "own_partial", "mlp": "own_partial"}], {"own_partial": {"own_part": True}}
    found = schedule_of(config_of([[0, 1]], pattern, modes, rewriter_ranks=2))
    assert [(step.late, step.own) for step in found.layers[0]] == [(False, False), (True, True)]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (SimpleNamespace(), "has no rewriter_delays"),
        (SimpleNamespace(rewriter_delays=[[0, 2]]), "more than one block late"),
        (
            SimpleNamespace(rewriter_delays=[[0, 1]], rewriter_exact={"rewriter_delays": [[0, 1]]}),
            "passes of all tokens rewire those that passes of the prompt leave exact",
        ),
        (config_of([[0, 0]], [{"layer": "drop"}], {}), "do not fit"),
        (config_of([[0, 0]], [{"a": "drop", "b": "keep"}], None), "no rewriter_modes"),
        (
            config_of([[0]], [{"a": "odd"}], {"odd": {"altered": True}}),
            "blocks of mode odd compute what only the generated code knows",
        ),
    ],
)
def test_what_a_schedule_cannot_say_is_refused(config, reason):
    with pytest.raises(Unsupported, match=reason):
        schedule_of(config)


class Norm(nn.Module):
    def forward(self, x, residual=None):
        return x if residual is None else (x, x + residual)


class Layer(nn.Module):
    """The children of every layer here."""

    factor = 0.5

    def __init__(self):
        super().__init__()
        for name in ("attention", "mlp"):
            setattr(self, name, nn.Linear(1, 1))
        for name in ("norm_1", "norm_2", "after_1", "after_2"):
            setattr(self, name, Norm())


class Paired(Layer):
    def forward(self, positions, hidden_states, residual, **kwargs):
        if residual is None:
            residual = hidden_states
            hidden_states = self.norm_1(hidden_states)
        else:
            hidden_states, residual = self.norm_1(hidden_states, residual)
        hidden_states = self.attention(positions, hidden_states=hidden_states, **kwargs)
        if hidden_states.dtype == torch.float16:
            hidden_states = hidden_states * 2
        hidden_states, residual = self.norm_2(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Normed(Layer):
    def forward(self, positions, hidden_states, residual):
        count = positions.shape[0]
        assert count is not None
        hidden_states, residual = self.norm_1(hidden_states, residual)
        hidden_states = self.after_1(self.attention(hidden_states))
        hidden_states, residual = self.norm_2(hidden_states, residual)
        return self.after_2(self.mlp(hidden_states)), residual


class Scaled(Layer):
    def forward(self, positions, hidden_states):
        residual = hidden_states
        hidden_states = residual + self.attention(self.norm_1(hidden_states), positions) * self.factor
        return hidden_states + self.mlp(self.norm_2(hidden_states)) * self.factor


class SideBySide(Layer):
    def forward(self, positions, hidden_states):
        read = self.norm_1(hidden_states)
        return hidden_states + self.attention(read) + self.mlp(read)


class Joint(Layer):
    def forward(self, positions, hidden_states, residual):
        residual = hidden_states
        read = self.norm_1(hidden_states)
        output = torch.empty_like(read)
        self.attention(read.clone(), positions, output)
        beside, _ = self.mlp(hidden_states=read * 2.0, residual=residual)
        return residual + (output * 3.0 + beside) * self.factor, residual


class HandsOn(nn.Module):
    def forward(self, hidden_states, residual):
        return hidden_states * 2, residual


class Uses(nn.Module):
    def forward(self, hidden_states, residual):
        return hidden_states + residual, residual


class TwoReads(Layer):
    def forward(self, hidden_states):
        return hidden_states + (self.attention(self.norm_1(hidden_states)) + self.mlp(self.norm_2(hidden_states)))


class Drops(Layer):
    def forward(self, hidden_states):
        self.attention(hidden_states)
        return hidden_states + self.mlp(hidden_states)


class Nonlinear(Layer):
    def forward(self, positions, hidden_states):
        return hidden_states + torch.relu(self.attention(hidden_states)) + self.mlp(hidden_states)


class Forgets(Layer):
    def forward(self, positions, hidden_states):
        hidden_states = hidden_states + self.attention(hidden_states)
        return self.mlp(hidden_states)


def form(layer_class, dtype=FP32):
    return form_of(layer_class(), ("attention", "mlp"), dtype)


def test_a_layer_that_hands_on_two_tensors():
    found = form(Paired)
    first, second = found.branches
    assert found.inputs == ("positions", "hidden_states", "residual")
    assert found.paired
    assert found.mergeable
    assert (first.paths, first.before, first.fused, first.after) == (("attention",), ("norm_1",), True, ())
    assert (first.calls[0].args, first.calls[0].kwargs) == (("positions",), (("hidden_states", None),))
    assert (second.paths, second.before, second.fused) == (("mlp",), ("norm_2",), True)


def test_a_layer_may_ask_for_dtypes_and_shapes():
    assert form(Paired, torch.float16).branches[0].after == (2.0,)
    assert [branch.after for branch in form(Normed).branches] == [("after_1",), ("after_2",)]
    assert not form(Normed).mergeable


def test_a_layer_that_hands_on_its_stream():
    found = form(Scaled)
    assert not found.paired
    assert found.mergeable
    assert [(b.before, b.fused, b.after) for b in found.branches] == [
        (("norm_1",), False, (0.5,)),
        (("norm_2",), False, (0.5,)),
    ]


@pytest.mark.parametrize(
    ("layer_class", "reason"),
    [
        (SideBySide, "does not read what all blocks before it"),
        (TwoReads, "does not read what all blocks before it"),
        (Nonlinear, "relu"),
        (Forgets, "is not the sum"),
        (Drops, "is not the sum"),
    ],
)
def test_other_layers_are_refused_by_what_they_do(layer_class, reason):
    with pytest.raises(Unsupported, match=reason):
        form(layer_class)


def joint(beside):
    layer = Joint()
    layer.mlp = beside()
    return form_of(layer, ("attention", "mlp"), FP32)


def test_a_block_of_two_children():
    (block,) = (found := joint(HandsOn)).branches
    assert (found.paired, found.spare) == (False, True)
    assert (block.paths, block.before, block.after) == (("attention", "mlp"), ("norm_1",), (0.5,))
    first, second = block.calls
    assert (first.args, first.kwargs, first.item) == ((None, "positions", Given.MEMORY), (), None)
    assert (first.entry, first.exit, first.writes) == ((None,), (3.0,), True)
    assert second.kwargs == (("hidden_states", None), ("residual", Given.NOTHING))
    assert (second.entry, second.exit, second.writes, second.item) == ((2.0,), (), False, 0)
    assert {b.before for b in found.with_norms({"mlp": "norm_1"}).branches} == {("norm_1",)}


def test_a_child_that_reads_the_stream_beside_its_input_is_refused():
    with pytest.raises(Unsupported, match="the call of mlp"):
        joint(Uses)


def test_blocks_may_read_through_another_norm():
    found = form(Scaled).with_norms({"mlp": "norm_1"})
    assert [b.before for b in found.branches] == [("norm_1",), ("norm_1",)]
    with pytest.raises(Unsupported, match="names"):
        form(Scaled).with_norms({"mlp": "after_1"})


def test_several_streams_are_not_vllms():
    """One line names them, and what serves the model instead."""
    config = SimpleNamespace(rewriter_delays=[[0, 1]], rewriter_streams=4)
    with pytest.raises(Unsupported, match=r"mix 4 residual streams.*rewrite serve DIR --engine transformers") as found:
        schedule_of(config)
    assert "\n" not in str(found.value)
    assert schedule_of(SimpleNamespace(rewriter_delays=[[0, 1], [1, 1]])).overlapped
