"""Rewired layers of the vLLM plugin against the wiring that config.json describes, on an engine of equal ranks."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rewriter.output.sum_schedule import schedule_of
from rewriter.runtime.serving.vllm import engine, sums
from rewriter.runtime.serving.vllm.layer_form import form_of
from rewriter.runtime.serving.vllm.rewired_layer import RewiredLayer

WIDTH, TOKENS = 8, 5
MODES = {
    "drop": {"sum": "left_out"},
    "keep_sum": {"sum": "all_since"},
    "keep_mean": {"sum": "mean"},
    "own_partial": {"own_part": True},
    "half": {"factor": 0.5},
}


class EqualRanks:
    """Ranks that all hold the same parts, so that a sum is a multiple."""

    def __init__(self, count=2):
        self.count, self.pieces = count, False
        self.before = lambda: None  # a sum

    def ranks(self):
        return self.count

    def all_reduce(self, x):
        return x * self.count

    def all_reduce_now(self, x):
        self.before()
        return x.mul_(self.count)

    def begin(self, x):
        return None

    def in_pieces(self):
        return self.pieces


@pytest.fixture(autouse=True)
def ranks():
    before = engine.engine
    engine.use(EqualRanks())
    yield engine.engine
    engine.use(before)


class Norm(nn.Module):
    """Like vLLM's: given two tensors, it overwrites both."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5, requires_grad=False)

    def forward(self, x, residual=None):
        if residual is None:
            return nn.functional.rms_norm(x, (WIDTH,), self.weight)
        residual.add_(x)
        x.copy_(nn.functional.rms_norm(residual, (WIDTH,), self.weight))
        return x, residual


class Block(nn.Module):
    """A rank's part of a sum, or the sum, of something nonlinear."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5, requires_grad=False)
        self.reduce_results = True

    def forward(self, x):
        part = torch.tanh(x @ self.weight)
        return engine.engine.all_reduce(part) if self.reduce_results else part


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Block(), Block()
        self.norm_1, self.norm_2, self.after_1, self.after_2 = Norm(), Norm(), Norm(), Norm()

    def begun(self, hidden_states, residual):
        """What the first block reads, and the stream."""
        return (self.norm_1(hidden_states), hidden_states) if residual is None else self.norm_1(hidden_states, residual)


class Paired(Layer):
    def forward(self, hidden_states, residual):
        hidden_states, residual = self.begun(hidden_states, residual)
        hidden_states = self.attention(hidden_states)
        hidden_states, residual = self.norm_2(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Normed(Layer):
    def forward(self, hidden_states, residual):
        hidden_states, residual = self.begun(hidden_states, residual)
        hidden_states = self.after_1(self.attention(hidden_states))
        hidden_states, residual = self.norm_2(hidden_states, residual)
        return self.after_2(self.mlp(hidden_states)), residual


class Scaled(Layer):
    factor = 0.5

    def forward(self, hidden_states):
        hidden_states = hidden_states + self.attention(self.norm_1(hidden_states)) * self.factor
        return hidden_states + self.mlp(self.norm_2(hidden_states)) * self.factor


class Writing(Block):
    """Writes into memory that it is given."""

    def forward(self, x, output):
        output.copy_(super().forward(x))


class Spoiling(Block):
    """Overwrites what it reads."""

    def forward(self, x):
        output = super().forward(x)
        x.zero_()
        return output


class HandingOn(Block):
    """Returns a tensor that it has made no use of, too."""

    def forward(self, hidden_states, residual):
        return super().forward(hidden_states), residual


class SideBySide(Layer):
    """Returns a tensor that no layer reads beside its stream; the second block is two children that read the same."""

    def __init__(self):
        super().__init__()
        self.attention, self.mlp, self.experts = Writing(), HandingOn(), Spoiling()

    def forward(self, hidden_states, residual):
        residual = hidden_states
        read = self.norm_1(hidden_states)
        output = torch.empty_like(read)
        self.attention(read, output)
        residual = hidden_states = residual + output * 0.5
        read = self.norm_2(hidden_states)
        experts = self.experts(read.clone()) * 2.0
        beside, _ = self.mlp(hidden_states=read * 0.75, residual=residual)
        return residual + (experts + beside * 0.25) * 0.5, residual


def part_of(layer, number, read):
    """A rank's part of a block's sum."""
    if isinstance(layer, SideBySide) and number == 1:
        return 2 * torch.tanh(read @ layer.experts.weight) + 0.25 * torch.tanh(0.75 * read @ layer.mlp.weight)
    return torch.tanh(read @ (layer.attention, layer.mlp)[number].weight)


def after(layer, number):
    """What a block's sum passes, of each kind of layer."""
    if isinstance(layer, Normed):
        return (layer.after_1, layer.after_2)[number]
    return (lambda x: x * 0.5) if isinstance(layer, Scaled | SideBySide) else (lambda x: x)


def blocks_of(layer):
    return [name for name, child in layer.named_children() if isinstance(child, Block)]


def bound(delays, pattern):
    """The config of a checkpoint that is bound to two ranks."""
    return SimpleNamespace(rewriter_delays=delays, rewriter_pattern=pattern, rewriter_modes=MODES, rewriter_ranks=2)


def reference(layers, config, x):
    """The stream after the last layer, straight from what delays and pattern mean. All ranks hold the same."""
    delays, count = config.rewriter_delays, engine.engine.ranks()
    pattern = getattr(config, "rewriter_pattern", None)
    values, drift = [x], torch.zeros_like(x)
    own = None
    for index, layer in enumerate(layers):
        labels = list(pattern[index].values()) if pattern else ["", ""]
        for number, norm in enumerate((layer.norm_1, layer.norm_2)):
            late, label = delays[index][number], labels[number]
            read = values[-1 - late] + drift + (own if late and label == "own_partial" else 0)
            part = part_of(layer, number, nn.functional.rms_norm(read, (WIDTH,), norm.weight))
            own = after(layer, number)(part)
            if label == "drop":
                drift = drift + own
                values.append(values[-1])
            elif label == "keep_sum":
                values.append(values[-1] + count * (drift + own))
                drift = torch.zeros_like(x)
            elif label == "keep_mean":
                values.append(count * (own + (values[-1] + drift) / count))
                drift = torch.zeros_like(x)
            else:
                added = after(layer, number)(count * part)
                values.append(values[-1] + (added / 2 if label == "half" else added))
    return values[-1]


def rewired(layer_class, config, cuts=()):
    """Layers as `rewire` makes them of vLLM's."""
    torch.manual_seed(0)
    layers = [layer_class() for _ in config.rewriter_delays]
    forms = [form_of(layer, blocks_of(layer), torch.float32) for layer in layers]
    schedule = schedule_of(config, cuts, all(form.mergeable for form in forms))
    made_class = type("Rewired", (RewiredLayer, layer_class), {})
    previous = ()
    for layer, form, steps in zip(layers, forms, schedule.layers, strict=True):
        if not any(step.unreduced or step.late or step.factor != 1.0 for step in steps):
            previous = ()
            continue
        for branch, step in zip(form.branches, steps, strict=True):
            for path in branch.paths:
                layer.get_submodule(path).reduce_results = not step.unreduced
        layer.__class__ = made_class
        layer.form, layer.steps = form.with_factors([step.factor for step in steps]), steps
        layer.previous = previous
        previous = (layer,)
    return layers


def stream(layers, x):
    hidden, residual = x.clone(), None
    for layer in layers:
        if isinstance(layer, Scaled):
            hidden = layer(hidden)
        else:
            hidden, residual = layer(hidden, residual)
    return hidden if residual is None or isinstance(layers[-1], SideBySide) else hidden + residual


RANDOM = torch.Generator().manual_seed(0)
TABLES = [[[0, 1], [1, 1], [1, 1]], [[0, 0], [1, 1], [0, 0]], [[0, 1]] * 3] + [
    [[0, *torch.randint(2, (1,), generator=RANDOM).tolist()], *torch.randint(2, (4, 2), generator=RANDOM).tolist()]
    for _ in range(8)
]


def labelled(*labels):
    """A pattern of three layers: the labels of each one's attention and MLP, or those of every layer."""
    labels = labels * 3 if len(labels) == 2 else labels
    return [dict(zip(("attention", "mlp"), labels[i : i + 2], strict=True)) for i in (0, 2, 4)]


STANDARD = [[0, 0]] * 3
HALVES = {"rewriter_pattern": labelled("half", "standard", "half", "half", "standard", "standard"),
          "rewriter_modes": MODES}  # fmt: skip
WIRINGS = {str(delays): SimpleNamespace(rewriter_delays=delays) for delays in TABLES} | {
    "desync, sum": bound(STANDARD, labelled("drop", "keep_sum")),
    "desync, four": bound(STANDARD, labelled("drop", "drop", "drop", "keep_sum", "standard", "standard")),
    "desync, mean": bound(STANDARD, labelled("standard", "standard", "drop", "keep_mean", "drop", "keep_mean")),
    "own partials": bound([[0, 1], [1, 1], [1, 1]], labelled("own_partial", "own_partial")),
    "factors": SimpleNamespace(rewriter_delays=STANDARD, **HALVES),
    "factors in a ladder": SimpleNamespace(rewriter_delays=[[0, 1], [1, 1], [0, 0]], **HALVES),
}
CASES = [
    (layer, name)
    for layer in (Paired, Normed, Scaled, SideBySide)
    for name in WIRINGS
    if not (layer is Normed and "desync" in name)  # `rewire` refuses norms that follow dropped sums
]


def check(layers, config):
    x = torch.randn(TOKENS, WIDTH)
    torch.testing.assert_close(stream(layers, x), reference(layers, config, x))


@pytest.mark.parametrize(("layer_class", "name"), CASES)
def test_every_wiring_gives_its_stream(layer_class, name):
    check(rewired(layer_class, WIRINGS[name]), WIRINGS[name])


def test_stages_hand_on_what_the_next_one_reads_late():
    config = SimpleNamespace(rewriter_delays=[[0, 1], [1, 1], [1, 1], [1, 1]])
    layers = rewired(Paired, config, cuts=[1])
    layers[2].previous = ()  # of another stage
    check(layers, config)


@pytest.mark.parametrize("layer_class", [Paired, pytest.param(Scaled, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_compiled_layers_give_the_same(layer_class):
    config = SimpleNamespace(rewriter_delays=[[0, 0], [1, 1], [0, 1]])
    layers, x = rewired(layer_class, config), torch.randn(TOKENS, WIDTH)
    compiled = torch.compile(lambda given: stream(layers, given), fullgraph=True, dynamic=True)
    for given in (x, x[:3], -x):
        torch.testing.assert_close(compiled(given), reference(layers, config, given))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("delays", [STANDARD, [[0, 1], [1, 1], [0, 0]]], ids=str)
def test_long_messages_travel_quantized(delays, compiled, ranks):
    sent = []
    ranks.quantized_sum_now = lambda x, format: (sent.append((format, len(x))), x.mul_(ranks.count))[1]
    wires = [{"format": "int8", "min_bytes": 4 * WIDTH * TOKENS}]
    config = SimpleNamespace(rewriter_delays=delays, rewriter_quantized=wires)
    layers, x = rewired(Paired, config), torch.randn(TOKENS, WIDTH)

    def run(given):
        return stream(layers, given)

    run = torch.compile(run, fullgraph=True, dynamic=True) if compiled else run
    for given in (x[:3], x):  # a short message, which travels exact, and a long one
        assert not sent
        torch.testing.assert_close(run(given), reference(layers, config, given))
    assert sent == [("int8", TOKENS)] * 6


def test_pieces_of_a_graph_sum_inline(ranks):
    ranks.pieces = True
    config = SimpleNamespace(rewriter_delays=[[0, 1], [1, 1]])
    check(rewired(Paired, config), config)
    assert sums_before_the_next_block(ranks)


@pytest.mark.parametrize(("setting", "inline"), [(None, False), ("1", False), ("0", True)])
def test_overlap_can_be_turned_off(ranks, monkeypatch, setting, inline):
    monkeypatch.delenv("REWRITER_OVERLAP", raising=False)
    if setting is not None:
        monkeypatch.setenv("REWRITER_OVERLAP", setting)
    sums.overlaps.cache_clear()
    try:
        assert sums_before_the_next_block(ranks) == inline
        config = SimpleNamespace(rewriter_delays=[[0, 1], [1, 1]])
        check(rewired(Paired, config), config)
    finally:
        sums.overlaps.cache_clear()


def sums_before_the_next_block(ranks) -> bool:
    """True if `begin` runs a sum itself, rather than a thread."""
    threads, x = [], torch.ones(TOKENS, WIDTH)
    ranks.before = lambda: threads.append(threading.current_thread())
    token, _ = sums.begin(x, x)
    sums.finish(token, x)
    ranks.before = lambda: None
    return threads == [threading.current_thread()]


def test_a_forgotten_sum_does_not_reach_the_next_pass():
    x = torch.ones(TOKENS, WIDTH)
    sums.begin(x, x)  # a pass that failed after it
    token, _ = sums.begin(2 * x, x)
    torch.testing.assert_close(sums.finish(token, x), 4 * x)


def test_a_sum_runs_while_the_next_block_does(ranks):
    begun, computed = threading.Event(), threading.Event()
    ranks.before = lambda: (begun.set(), met.append(computed.wait(120)))
    met, x = [], torch.ones(TOKENS, WIDTH)
    token, _ = sums.begin(x, x)
    assert begun.wait(120)  # and is not over
    assert met == []
    computed.set()  # by the next block
    sums.finish(token, x)
    assert met == [True]


def test_an_error_of_a_sum_is_told_where_it_ends(ranks):
    ranks.all_reduce_now = lambda x: 1 / 0
    x = torch.ones(TOKENS, WIDTH)
    token, _ = sums.begin(x, x)
    with pytest.raises(ZeroDivisionError):
        sums.finish(token, x)
