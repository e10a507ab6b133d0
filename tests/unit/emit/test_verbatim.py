"""Code that generated files contain as it is written, tried where it stands: two ranks on one device."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from rewriter.emit.huggingface.verbatim import model, per_rank, source_of
from rewriter.emit.huggingface.verbatim.per_rank import RANKS
from rewriter.emit.huggingface.wiring_code import LayerArguments, arguments_of
from rewriter.ir import LayerArgument, PythonCall, Source

BATCH, TOKENS, HIDDEN = 2, 3, 8


def states(*sizes: int) -> torch.Tensor:
    return torch.randn(BATCH, TOKENS, *sizes, generator=torch.Generator().manual_seed(0))


def of_class(module: nn.Module, cls: type, **options: object) -> nn.Module:
    module.__class__ = cls
    for name, value in options.items():
        setattr(module, name, value)
    return module


def test_what_is_packed_is_unpacked() -> None:
    values = [states(HIDDEN), states(RANKS, HIDDEN) + 1, states(HIDDEN) + 2]
    packed = per_rank.pack(*values)
    assert packed.shape == (BATCH, TOKENS, (2 + RANKS) * HIDDEN)
    again = per_rank.unpack(packed, (1, RANKS, 1))
    assert all(torch.equal(a, b) for a, b in zip(values, again, strict=True))


@pytest.mark.parametrize("bias", [True, False])
def test_a_column_parallel_projection_reads_every_ranks_own_input(bias: bool) -> None:
    plain, own = nn.Linear(HIDDEN, 6, bias=bias), states(RANKS, HIDDEN)
    column = of_class(copy.deepcopy(plain), per_rank.PerRankColumnLinear)
    expected = torch.cat([plain(own[:, :, r]).chunk(RANKS, -1)[r] for r in range(RANKS)], dim=-1)
    torch.testing.assert_close(column(own.flatten(-2)), expected)


def test_a_fused_column_parallel_projection_is_made_of_segments() -> None:
    plain, own = nn.Linear(HIDDEN, 12), states(RANKS, HIDDEN)
    column = of_class(copy.deepcopy(plain), per_rank.PerRankColumnLinear, segments=[8, 4])
    parts = [plain(own[:, :, r]).split([8, 4], dim=-1) for r in range(RANKS)]
    expected = torch.cat([torch.cat([parts[r][s].chunk(RANKS, -1)[r] for r in range(RANKS)], -1) for s in (0, 1)], -1)
    torch.testing.assert_close(column(own.flatten(-2)), expected)


def test_ranks_may_hold_the_same_rows() -> None:
    plain, own = nn.Linear(HIDDEN, 4), states(RANKS, HIDDEN)
    column = of_class(copy.deepcopy(plain), per_rank.PerRankColumnLinear, rows=[(0, 4), (0, 4)])
    torch.testing.assert_close(column(own.flatten(-2)), torch.cat([plain(own[:, :, r]) for r in range(RANKS)], dim=-1))


@pytest.mark.parametrize("bias", [True, False])
def test_the_parts_of_a_row_parallel_projection_sum_to_it(bias: bool) -> None:
    plain, x = nn.Linear(HIDDEN, 6, bias=bias), states(HIDDEN)
    row = of_class(copy.deepcopy(plain), per_rank.PerRankRowLinear)
    parts = row(x)
    assert parts.shape == (BATCH, TOKENS, RANKS, 6)
    torch.testing.assert_close(parts.sum(-2), plain(x))
    first = x[..., : HIDDEN // RANKS] @ plain.weight[:, : HIDDEN // RANKS].t()
    torch.testing.assert_close(parts[:, :, 0], first + (plain.bias / RANKS if bias else 0))


def test_tokens_of_ranks_pass_their_ranks_part() -> None:
    up, down, own = nn.Linear(HIDDEN, 6), nn.Linear(6, HIDDEN), states(RANKS, HIDDEN)
    column = of_class(copy.deepcopy(up), per_rank.PerRankTokenColumnLinear)
    row = of_class(copy.deepcopy(down), per_rank.PerRankTokenRowLinear)
    outputs = row(column(own.flatten(1, 2))).unflatten(1, (-1, RANKS))
    for rank in range(RANKS):
        inner = up(own[:, :, rank]).chunk(RANKS, -1)[rank]
        expected = inner @ down.weight.chunk(RANKS, 1)[rank].t() + down.bias / RANKS
        torch.testing.assert_close(outputs[:, :, rank], expected)


def test_conv1d_holds_its_weight_the_other_way_round() -> None:
    plain, x = Conv1D(6, HIDDEN), states(HIDDEN)
    row = of_class(copy.deepcopy(plain), type("PerRankRowConv1D", (per_rank.PerRankRow, Conv1D), {}))
    torch.testing.assert_close(row(x).sum(-2), plain(x))


class Layer(nn.Module):
    """A layer whose norm has weights per rank."""

    per_rank_modules = (("norm", type("PerRankRMSNorm", (per_rank.PerRankNorm, LlamaRMSNorm), {}), {}),)

    def __init__(self) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def test_a_norm_has_weights_per_rank() -> None:
    layer, own = Layer(), states(RANKS, HIDDEN)
    per_rank.use_per_rank_modules(layer)
    with torch.no_grad():
        layer.norm.weight.copy_(torch.arange(RANKS * HIDDEN))
    plain = LlamaRMSNorm(HIDDEN)
    for rank in range(RANKS):
        plain.weight.data = torch.arange(rank * HIDDEN, (rank + 1) * HIDDEN).float()
        torch.testing.assert_close(layer(own)[:, :, rank], plain(own[:, :, rank]))
    layer.norm = LlamaRMSNorm(HIDDEN)
    with pytest.raises(TypeError, match=r"norm of a Layer became a LlamaRMSNorm, which cannot compute the 2 ranks"):
        layer(own)


def test_code_is_taken_as_it_is_but_for_names_and_what_is_absent() -> None:
    absent = ["RANKS", "use_per_rank_modules", "refuse_dropout", "refuse_engines", "tell_layers"]
    text = source_of(model.rewire, {"SourceModel": "MyModel"}, absent)
    assert "`model`, a MyModel, the class" in text
    assert not {*absent} & set(text.replace("(", " ").split())
    assert "if width != ALONE:" in text
    assert source_of(per_rank.pack) in Path(per_rank.__file__).read_text()
    compile(text, "rewire", "exec")


def test_a_models_layers_get_their_classes() -> None:
    names = ("LAYER_CLASSES", "is_missing", "narrow_hidden_states")
    scope = {name: getattr(model, name) for name in names}
    absent = ["RANKS", "use_per_rank_modules", "refuse_dropout", "refuse_engines", "tell_layers"]
    exec(source_of(model.rewire, {"ALONE": "1"}, absent), scope)
    config = LlamaConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=8)
    source = model.SourceModel(config)
    config.rewriter_layers = ["standard", "standard"]
    scope["rewire"](source, source.layers)
    assert all(type(layer) is LlamaDecoderLayer for layer in source.layers)
    config.rewriter_layers = ["standard", "unknown"]
    with pytest.raises(ValueError, match=r"rewriter_layers\[1\] is 'unknown'; there are standard"):
        scope["rewire"](source, source.layers)
    config.rewriter_layers = ["standard"]
    with pytest.raises(ValueError, match="names 1 layers, the model has 2"):
        scope["rewire"](source, source.layers)


# --- what the cache is called


class Mixer(nn.Module):
    def forward(self, x: torch.Tensor, cache_params: object = None, **kwargs: object) -> torch.Tensor:
        return x


class Recurrent(nn.Module):
    """As RecurrentGemma's block, which gets the cache that its attention is given, and has no name for it."""

    def forward(self, x: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return x


class Attention(nn.Module):
    def forward(self, x: torch.Tensor, past_key_values: object = None, cache: object = None) -> torch.Tensor:
        return x


def test_every_child_gets_the_cache_under_its_own_name() -> None:
    mixer, block = Recurrent(), Recurrent()
    mixer.inner, block.attn = Mixer(), Attention()
    layer = nn.ModuleDict({"mixer": Mixer(), "outer": mixer, "block": block, "recurrent": Recurrent()})
    model.name_caches(layer)
    expected = {"mixer": "cache_params", "outer": "cache_params", "outer.inner": "cache_params"}
    expected |= {"block": "cache", "block.attn": "cache", "recurrent": model.CACHE_NAMES[0]}
    assert {path: name for path, name in layer.cache_names.items() if path} == expected
    for name in model.CACHE_NAMES:
        kwargs = {"position_ids": 1, name: "the cache"}
        assert model.take_cache(kwargs) == "the cache"
        assert kwargs == {"position_ids": 1}
    assert model.take_cache({"position_ids": 1}) is None


def call(splat: bool, **kwargs: str) -> PythonCall:
    return PythonCall((), {name: LayerArgument(value) for name, value in kwargs.items()}, splat, None)


BOTH = call(True, mask="mask", cache="cache")


@pytest.mark.parametrize(
    ("calls", "by_place", "expected"),
    [
        # attention and an MLP: all that attention is given travels
        ([(BOTH, True), (call(False), False)], 1, (("x",), {"mask", "cache"}, None, False)),
        # a mixer without attention, which other versions give the cache by another name
        ([(call(True, cache="cache", mask="mask"), False)], 1, (("x",), {"mask"}, "cache", True)),
        # two children, of which one is not given the mask
        ([(BOTH, True), (call(True, cache="cache"), True)], 1, (("x", "mask"), {"cache"}, None, False)),
        # the layer's **kwargs are not passed on
        ([(call(False, mask="mask", cache="cache"), True)], 1, (("x", "mask"), set(), "cache", True)),
        # another name than the layer's
        ([(call(True, cache_params="cache"), True)], 1, (("x", "mask"), set(), "cache", True)),
        # the model passes both by place
        ([(BOTH, True)], 3, (("x", "mask", "cache"), set(), "cache", False)),
    ],
)  # fmt: skip
def test_what_a_layer_hands_on_travels_in_its_kwargs(
    calls: list[tuple[PythonCall, bool]], by_place: int, expected: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rewriter.emit.huggingface.wiring_code.passed_by_place", lambda _: by_place)
    source = object.__new__(Source)
    object.__setattr__(source, "layer_arguments", ("x", "mask", "cache"))
    named, travelling, cache, takes = expected
    assert arguments_of(source, calls, ()) == LayerArguments(named, frozenset(travelling), cache, takes)  # type: ignore[arg-type]
