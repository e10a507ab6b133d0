"""The loss of a causal language model whose rows and tokens are sharded over many ranks.

The loss of a rank is the sum of its own tokens' losses over the mean number of targets of a data-parallel replica, that
of all its tokens: gradients that are summed over the ranks of a sequence and averaged over replicas are those of the
mean over all targets, however unevenly these are sharded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rewriter.runtime.collectives import all_reduce
from rewriter.runtime.replicas import Replicas
from rewriter.runtime.with_gradient import with_gradient

IGNORED = -100


def next_tokens(labels_BS: Tensor) -> Tensor:
    """int64 [B, S]: what each position predicts, the label of the next one; IGNORED at the end.

    For full sequences: within a rank's tokens the next label is not that of the next token.
    """
    return F.pad(labels_BS[:, 1:], (0, 1), value=IGNORED)


def global_loss(logits_BSV: Tensor, targets_BS: Tensor, replicas: Replicas) -> Tensor:
    """The mean cross entropy over the targets of all ranks that are not IGNORED: a scalar, fp32 (fp64 of fp64 logits).

    Its value is equal on all ranks. Its gradient flows through this rank's tokens alone, scaled as the head of this
    file says; the sum that makes the value takes no part in it. Without any target, loss and gradients are 0: one batch
    in which everything is ignored shall not end a training run in NaN, as the mean of nothing would.
    """
    dtype = torch.promote_types(logits_BSV.dtype, torch.float32)
    own = F.cross_entropy(
        logits_BSV.flatten(0, 1).to(dtype), targets_BS.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    # in fp64, which counts exactly
    totals = torch.stack([own.detach().double(), (targets_BS != IGNORED).sum().double()])
    total, targets = all_reduce(totals, replicas.group, "loss").unbind()
    targets = targets.clamp(min=1)
    scaled = own * (replicas.data_parallel / targets).to(dtype)
    return with_gradient(scaled, lambda _: (total / targets).to(dtype))
