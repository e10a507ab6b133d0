"""An independent reference for ladder: the unmodified eager Hugging Face model, whose blocks read other inputs.

A ladder changes only what each block *reads*. Number the blocks of a model in order; let X_0 be the stream before the
first, X_{j+1} = X_j + block_j(read_j). Standard: read_j = X_j. In a ladder layer: read_j = X_{j-1}, with X_{-1} := X_0.
Both transitions follow from that. Where blocks begin and end is found by watching a forward pass (see `eager_blocks`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from rewriter.common.errors import RewriterError
from rewriter.verify.eager_blocks import find_structure
from rewriter.verify.stream_hooks import Ledger, decoder_layers, watched


@contextmanager
def ladder_reference(model: PreTrainedModel, layers: Collection[int]) -> Iterator[PreTrainedModel]:
    """Within the `with`, `model` (eval mode) computes the ladder of itself on `layers`: forward, backward, `generate`.

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
