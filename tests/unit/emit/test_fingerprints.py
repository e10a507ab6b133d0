"""What a generated file compares of the source's classes: all that changes a result, and nothing else."""

import importlib.util
import textwrap
from pathlib import Path

import pytest
import transformers

from rewriter.common.errors import RewriterError
from rewriter.emit.huggingface.source_check import fingerprint, installed_fingerprint, table, versions_with

MODULE = '''
from torch import nn

SCALE = 2.0


def add(x, y: Tensor) -> Tensor:
    """The sum."""
    return x + helper(y)


def helper(y):
    return y


def other(y):
    return y


class Inner(nn.Module):
    def forward(self, x):
        return ~x


class MLP(nn.Module):
    def __init__(self, size):
        self.inner = Inner(size)

    def forward(self, x):
        return -x


class Base(nn.Module):
    def half(self, x):
        return x / 2


class Layer(Base):
    def __init__(self, config):
        super().__init__()
        size = config.size
        kind = "fast" if config.fast else "slow"
        self.scale = config.scale
        if config.gated:
            self.mlp = MLPS[kind](size)
        else:
            self.mlp = MLP(size)
        self.norm = Norm(config.size)

    def forward(self, states: Tensor, mask: Tensor | None = None, **kwargs) -> tuple[Tensor]:
        """Computes the layer."""
        count: int = 1
        # the sum
        states = add(self.half(states), self.mlp(self.norm(states)))
        return states * self.scale, count
'''
# What to exchange, and whether it is a change: of a class as a whole, and of its forward alone.
SAME = {
    "a comment": ("# the sum\n", "# of both\n"),
    "a docstring": ('"""Computes the layer."""', "'''Computes\n        what it did.'''"),
    "no docstring": ('        """Computes the layer."""\n', ""),
    "an annotation of a parameter": ("mask: Tensor | None = None", 'mask: "FloatTensor" = None'),
    "an annotation of what is returned": (" -> tuple[Tensor]:", ":"),
    "an annotation of a variable": ("count: int = 1", "count = 1"),
    "an annotation of a helper": ("y: Tensor) -> Tensor", "y)"),
    "line breaks": ("add(self.half(states), ", "add(\n            self.half(states),\n            "),
    "quotes": ('"fast" if', "'fast' if"),
    "a class beside it": ("SCALE = 2.0", "class Unrelated:\n    pass"),
    "a function that it does not name": ("def other(y):\n    return y", "def other(y):\n    return -y"),
}
CHANGED = {
    "an operator": ("states * self.scale", "states / self.scale"),
    "a default": ("mask: Tensor | None = None", "mask: Tensor | None = 0"),
    "the name of a parameter": ("mask: Tensor", "attention_mask: Tensor"),
    "the order of calls": ("self.mlp(self.norm(states))", "self.norm(self.mlp(states))"),
    "an argument": ("self.mlp(self.norm(states))", "self.mlp(self.norm(states), mask)"),
    "a value that forward reads": ("self.scale = config.scale", "self.scale = 2 * config.scale"),
    "a decorator": ("    def forward(self, states", "    @doubled\n    def forward(self, states"),
    "a function that it calls": ("return x + helper(y)", "return x - helper(y)"),
    "a function that this calls": ("def helper(y):\n    return y", "def helper(y):\n    return -y"),
    "a base": ("return x / 2", "return x / 3"),
    "another base": ("class Layer(Base)", "class Layer(nn.Module)"),
    "a child that forward also reads": ("self.half(states)", "self.half(states) + self.norm.eps"),
}
# A layer as one release wrote it, and the next: the cache has another name, the old one is deprecated, it is told more.
RELEASE = '''
class Attention(nn.Module):
    @use_kernel_func("attention")
    def forward(self, x, past_key_values: Cache | None = None, **kwargs):
        """Attends."""
        if past_key_values is not None:
            x = past_key_values.update(x, x, self.layer_idx)
        return x


class Layer(nn.Module):
    def __init__(self, config):
        self.attention = Attention(config)
        self.scale = config.scale

    def forward(self, x, layer_past=None, past_key_values: Cache | None = None, **kwargs):
        count: int = 1
        x = x + self.scale * self.attention(x, past_key_values=past_key_values, **kwargs)
        return x, kwargs.get("past_key_values"), count
'''
NEXT = '''
@auto_docstring
class Attention(nn.Module):
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(self, x, cache=None, **kwargs: Unpack[Kwargs]) -> Tensor:
        if cache is not None:
            x = cache.update(x, x, self.layer_idx, kwargs=kwargs)
        return x


class Layer(nn.Module):
    def __init__(self, config):
        """Makes children."""
        self.attention = Attention(config)
        self.scale = config.scale

    @torch.no_grad()
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(self, x: Tensor, cache=None, cache: Cache = None, **kwargs) -> Tensor:
        count = 1
        x = x + self.scale * self.attention(x, cache=cache, **kwargs)
        return x, kwargs.get("cache"), count
'''.replace("cache=None, cache: Cache = None", "layer_past=None, cache: Cache = None")
REWIRED = {
    "what a block adds to": ("x = x + self.scale", "x = self.scale"),
    "what a block reads": ("self.attention(x,", "self.attention(2 * x,"),
    "another argument is handed on": ("cache=cache, **kwargs)", "cache=None, **kwargs)"),
    "a sign": ("x = x + self.scale", "x = x - self.scale"),
    "an unknown decorator": ("@torch.no_grad()", "@doubled"),
    "an argument of a call": ('kwargs.get("cache")', 'kwargs.get("mask")'),
}
CHILDREN = {
    "the code of a child": ("return -x", "return 0 - x"),
    "the code of a child's child": ("return ~x", "return not x"),
    "the class of a child": ("self.norm = Norm(", "self.norm = RMSNorm("),
    "how a child is chosen": ('"fast" if config.fast', '"fast" if is_fast(config)'),
    "when a child is another one": ("if config.gated:", "if config.gated and config.fast:"),
}


def changed(exchange: tuple[str, str], text: str = MODULE) -> str:
    assert text.count(exchange[0]) == 1
    return text.replace(*exchange)


def both(module: str) -> tuple[str, str]:
    return fingerprint(module, "Layer", forward_only=True), fingerprint(module, "Layer", forward_only=False)


@pytest.mark.parametrize("what", SAME)
def test_what_changes_no_result_does_not_count(what: str) -> None:
    assert both(changed(SAME[what])) == both(MODULE)


@pytest.mark.parametrize("what", CHANGED)
def test_what_changes_results_counts(what: str) -> None:
    for found, known in zip(both(changed(CHANGED[what])), both(MODULE), strict=True):
        assert found != known


@pytest.mark.parametrize("what", CHILDREN)
def test_how_children_are_made_counts_only_for_the_whole_class(what: str) -> None:
    (forward, whole), known = both(changed(CHILDREN[what])), both(MODULE)
    assert forward == known[0]
    assert whole != known[1]


def test_two_releases_that_compute_the_same_are_one() -> None:
    assert both(RELEASE) == both(NEXT)


@pytest.mark.parametrize("what", REWIRED)
def test_a_change_of_wiring_between_releases_counts(what: str) -> None:
    for found, known in zip(both(changed(REWIRED[what], NEXT)), both(RELEASE), strict=True):
        assert found != known


def test_what_a_cache_is_given_counts() -> None:
    other = changed(("cache.update(x, x,", "cache.update(x, -x,"), NEXT)
    assert both(other)[1] != both(RELEASE)[1]


def test_nearly_all_layers_are_the_same_before_and_after_the_cache_was_renamed() -> None:
    """Of the 176 layers that 5.23 and 5.24 both have: their forwards, and all of their code."""
    versions = table()["versions"]
    for kind, alike in (("forward", 171), ("whole", 148)):
        same = 0
        for names in table()[kind].values():
            for history in names.values():
                since = {versions[0]: history} if isinstance(history, str) else history
                held = max(
                    (v for v in since if versions.index(v) <= versions.index("5.23.0")), key=versions.index, default=""
                )
                same += bool(held) and since[held] is not None and "5.24.0" not in since
        assert same >= alike


@pytest.mark.parametrize("use", ["self.norm.eps", "helper(self)", "getattr(self, 'norm')"])
def test_children_count_that_may_be_read(use: str) -> None:
    """`self` itself in other hands: everything of it may be read."""
    reading = changed(("states * self.scale", f"states * self.scale * {use}"))
    other = changed(CHILDREN["the class of a child"], reading)
    assert fingerprint(other, "Layer", forward_only=True) != fingerprint(reading, "Layer", forward_only=True)


def test_a_class_may_be_defined_under_a_condition() -> None:
    """As those of xLSTM are, where the library of that name is not installed."""
    nested = "if is_available():\n    pass\nelse:\n" + textwrap.indent(MODULE, "    ")
    assert both(nested) == both(MODULE)


def test_a_fingerprint_is_the_same_in_every_version_of_python() -> None:
    """Made with Python 3.11, whose `ast.dump` prints other fields than that of 3.12 and 3.13."""
    text = textwrap.dedent("""
        class Layer:
            def forward(self, x, *rest, y=(1, 2.5), **kwargs) -> int:
                z = {**kwargs, "name": f"{x!r:>{y[0]}} of {y}"}
                return [v for v in z.values() if v is not None], x[..., 1:], lambda a: -a, b"bytes", u"text"
    """)
    assert fingerprint(text, "Layer", forward_only=False) == "ad83bd84955fc341"


# --- the table


def entries(kind: str) -> list[tuple[str, str]]:
    return [(module, name) for module, names in table()[kind].items() for name in names]


@pytest.mark.parametrize("kind", ["forward", pytest.param("whole", marks=pytest.mark.slow)])
def test_the_table_is_right_for_the_installed_version(kind: str) -> None:
    version = transformers.__version__
    assert version in table()["versions"], f"benchmarks/models/fingerprints.py --write adds transformers {version}"
    root, wrong = Path(str(importlib.util.find_spec("transformers").origin)).parent, []  # type: ignore[union-attr]
    for module, name in entries(kind):
        file = (root / "models" / module.replace(".", "/")).with_suffix(".py")
        exists = file.exists() and f"class {name}(" in (text := file.read_text())
        digest = fingerprint(text, name, kind == "forward") if exists else None
        if (version in versions_with(f"transformers.models.{module}", name, kind == "forward", digest)) != exists:
            wrong.append(f"{module}.{name}")
    assert not wrong
    assert len(entries(kind)) > 150


def test_versions_that_made_another_layer_are_not_named() -> None:
    """LFM2's layers got other arguments in 5.22 and 5.23; Falcon's only make their attention differently."""
    module = "transformers.models.llama.modeling_llama"
    digest = installed_fingerprint(module, "LlamaDecoderLayer", True)
    assert versions_with(module, "LlamaDecoderLayer", True, digest) == set(table()["versions"])
    assert not versions_with(module, "LlamaDecoderLayer", True, "0" * 16)
    lfm2 = table()["forward"]["lfm2.modeling_lfm2"]["Lfm2DecoderLayer"]
    assert [*lfm2] == ["5.17.0", "5.22.0", "5.23.0"]
    between = versions_with("transformers.models.lfm2.modeling_lfm2", "Lfm2DecoderLayer", True, lfm2["5.22.0"])
    assert between == {"5.22.0", "5.22.1", "5.22.2"}
    assert isinstance(table()["forward"]["falcon.modeling_falcon"]["FalconDecoderLayer"], str)
    assert isinstance(table()["whole"]["falcon.modeling_falcon"]["FalconDecoderLayer"], dict)


def test_a_class_without_source_is_refused() -> None:
    with pytest.raises(RewriterError, match=r"the source of transformers.models.llama.modeling_llama.Nothing"):
        installed_fingerprint("transformers.models.llama.modeling_llama", "Nothing", True)
