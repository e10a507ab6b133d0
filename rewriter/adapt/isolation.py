"""Whether a Hugging Face model keeps the segments of a packed row apart: measured, since no attribute says it."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor

# Of the first two rows' segments. Two rows, as some attention kernels find segments in a batch of one row only; short,
# so that a window over the last few tokens reaches across the boundaries, and none as long as another.
_SEGMENTS = ((7, 11, 6), (9, 4, 11))


def isolates_segments(model: Any) -> bool:
    """Whether `model` computes each segment of a packed row as if it were alone.

    `model` is a causal LM of transformers, called as in training with packed rows: input_ids and position_ids that
    restart at 0, no attention mask, no cache. Measured by one forward and backward pass over two rows of 24 tokens, in
    eval mode: nothing of a segment's logits may depend on the embedding of a token of an earlier one (the gradient is
    exactly 0, in any dtype), and they are those of the segment alone, up to rounding. False where positions or
    boundaries are not heeded; such a model has to be trained on rows without packing. Its gradients and mode stay as
    they were.
    """
    device = model.get_input_embeddings().weight.device
    vocabulary = model.get_input_embeddings().weight.shape[0]
    length = sum(_SEGMENTS[0])
    # Like any other text, drawn without touching the caller's generator.
    drawn = torch.randint(0, vocabulary, (len(_SEGMENTS), length), generator=torch.Generator().manual_seed(0))
    ids_BS = drawn.to(device)
    positions_BS = torch.tensor([[i for size in row for i in range(size)] for row in _SEGMENTS], device=device)
    training = model.training
    model.eval()
    try:
        with torch.enable_grad():
            logits_BSV, embedded_BSD = _with_embeddings(model, ids_BS, positions_BS)
            for row, sizes in enumerate(_SEGMENTS):
                for index in range(1, len(sizes)):
                    start = sum(sizes[:index])
                    reads = logits_BSV[row, start : start + sizes[index]].float().logsumexp(-1).sum()
                    (gradient,) = torch.autograd.grad(reads, embedded_BSD, retain_graph=True)
                    others = gradient.clone()
                    others[row, start : start + sizes[index]] = 0
                    if others.count_nonzero():  # NaN counts too
                        return False
        with torch.no_grad():
            return all(
                _as_alone(model, ids_BS[row, start : start + size], logits_BSV[row, start : start + size])
                for row, sizes in enumerate(_SEGMENTS)
                for start, size in zip((0, sizes[0], sizes[0] + sizes[1]), sizes, strict=True)
            )
    finally:
        model.train(training)


def _with_embeddings(model: Any, ids_BS: Tensor, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of packed rows and the embeddings that they were computed from, with a graph between them."""
    seen: list[Tensor] = []

    def keep(module: Any, args: Any, output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()
        seen.append(leaf)
        return leaf.clone()  # a leaf may not be changed in place

    hook = model.get_input_embeddings().register_forward_hook(keep)
    try:
        logits = model(input_ids=ids_BS, position_ids=positions_BS, use_cache=False).logits
    finally:
        hook.remove()
    return logits, seen[0]


def _as_alone(model: Any, ids_S: Tensor, packed_SV: Tensor) -> bool:
    alone_SV = model(input_ids=ids_S[None], use_cache=False).logits[0]
    errors = (packed_SV.float() - alone_SV.float()).norm(dim=-1) / alone_SV.float().norm(dim=-1)
    # The median: rounding may send a token to another expert, which changes its logits altogether.
    return statistics.median(errors.tolist()) <= torch.finfo(alone_SV.dtype).eps ** 0.5
