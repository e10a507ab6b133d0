"""Residual blocks of an eager Hugging Face model, found by watching its stream, and the ladder made of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from rewriter.check.stream_hooks import Ledger, Watch, decoder_layers, few_ids, watch_few, watched
from rewriter.common.errors import RewriterError


@dataclass(frozen=True)
class Structure:
    """The blocks of a model: block b reads stream value `starts[b]` and makes the values up to `starts[b + 1]`.

    `layers[b]` is its decoder layer, `readers[b]` are the modules that read for it, `modules[b]` those that run in it.
    `chain` names the additions that make the stream: value t + 1 comes from the `chain[t]`-th addition to value t.
    """

    chain: tuple[int, ...]
    starts: tuple[int, ...]
    layers: tuple[int, ...]
    readers: tuple[tuple[nn.Module, ...], ...]
    modules: tuple[tuple[nn.Module, ...], ...]

    @property
    def last(self) -> int:
        """The number of the last stream value, which the final norm reads."""
        return len(self.chain)


@torch.no_grad()
def find_structure(model: PreTrainedModel) -> Structure:
    """The blocks of `model` (eval mode), found by running it on three tokens.

    Raises RewriterError when the stream cannot be followed, or when its reads do not explain the model's logits.
    """
    expected = model(input_ids=few_ids(model), use_cache=False).logits
    watch, _ = watch_few(model, Ledger())
    chain: list[int] = []
    value = watch.returned
    while value > 0:
        value, count = watch.made[value]
        chain.insert(0, count)
    watch, actual = watch_few(model, Ledger(), tuple(chain))
    # The same additions in the same order: a difference means a read that was not seen, or a change of the stream.
    if not torch.allclose(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())):
        raise RewriterError(
            f"{type(model).__name__}: the residual stream cannot be followed: something reads or changes it elsewhere "
            "than in additions, casts and calls of torch functions"
        )
    return _blocks(model, watch, tuple(chain))


def _blocks(model: PreTrainedModel, watch: Watch, chain: tuple[int, ...]) -> Structure:
    last = len(chain)
    starts = tuple(sorted({value for value, _ in watch.reads if value < last}))
    if not starts or starts[0] != 0:
        raise RewriterError(f"{type(model).__name__}: no layer reads the residual stream that the first one is given")
    layers: list[int] = []
    readers: list[tuple[nn.Module, ...]] = []
    modules: list[tuple[nn.Module, ...]] = []
    for start, end in zip(starts, (*starts[1:], last), strict=True):
        own = [reader for value, reader in watch.reads if value == start]
        if strays := [reader for reader in own if reader.layer != own[0].layer]:
            raise RewriterError(
                f"layer {strays[0].layer} ({type(strays[0].module).__name__}) reads the residual stream as it was for "
                f"layer {own[0].layer}"
            )
        layers.append(own[0].layer)
        readers.append(tuple(dict.fromkeys(reader.module for reader in own)))
        modules.append(tuple(dict.fromkeys(module for value, module in watch.calls if start <= value < end)))
    return Structure(chain, starts, tuple(layers), tuple(readers), tuple(modules))


@contextmanager
def ladder_reference(model: PreTrainedModel, layers: Collection[int]) -> Iterator[PreTrainedModel]:
    """Within the `with`, `model` (eval mode) computes the ladder of itself on `layers`: forward, backward, `generate`.

    An independent reference (Ladder Residual, arXiv 2501.06589, Eq. 2): a ladder changes only what each block *reads*.
    Let X_0 be the stream before the first block, X_{j+1} = X_j + block_j(read_j). Standard: read_j = X_j. In a ladder
    layer: read_j = X_{j-1}, with X_{-1} := X_0. Both transitions follow from that.

    Raises RewriterError for a layer that the model does not have, and when its stream cannot be followed.
    """
    check_layers("ladder reference", model, layers)
    structure = find_structure(model)
    starts = structure.starts
    # what is read where the model reads stream value `start`: the start of the block before
    source = {structure.last: structure.last} | {
        start: starts[max(block - 1, 0)] if structure.layers[block] in layers else start
        for block, start in enumerate(starts)
    }
    with watched(model, Ledger(lambda values, value: values[source[value]]), structure.chain):
        yield model


def check_layers(name: str, model: PreTrainedModel, layers: Collection[int]) -> None:
    """Raises RewriterError for layers that `model` does not have."""
    depth = len(decoder_layers(model))
    if surplus := sorted(set(layers) - set(range(depth))):
        raise RewriterError(f"{name}: layers {surplus}, the model has 0 to {depth - 1}")
