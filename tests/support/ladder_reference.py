"""The ladder of an eager Hugging Face model of any family, within a `with`: for `generate`, and for gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from rewriter.check.stream_hooks import Ledger, check_layers, find_structure, watched


@contextmanager
def ladder_reference(model: PreTrainedModel, layers: Collection[int]) -> Iterator[PreTrainedModel]:
    """Within the `with`, `model` (eval mode) computes the ladder of itself on `layers`: forward, backward, `generate`.

    Ladder Residual (arXiv 2501.06589), Eq. 2: a ladder changes only what each block *reads*. Let X_0 be the stream
    before the first block, X_{j+1} = X_j + block_j(read_j). Standard: read_j = X_j. In a ladder layer:
    read_j = X_{j-1}, with X_{-1} := X_0. Both transitions follow from that.

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
