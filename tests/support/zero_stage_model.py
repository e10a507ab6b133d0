"""The model of the tests of ZeRO stages 1 and 2, its rows, and its optimizer."""

from __future__ import annotations

import copy
import functools

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WIDTH, LENGTH = 53, 12, 9


class Model(nn.Module):
    """Odd shapes, a tied weight, a frozen one, one that takes no part, and one that takes part on the last rank."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.Linear(WIDTH, 31)
        self.gain = nn.Parameter(torch.ones(31))
        self.down = nn.Linear(31, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Parameter(torch.randn(17))
        self.sometimes = nn.Parameter(torch.randn(VOCAB))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, ids, last):
        x = self.embed(ids)
        x = x + self.down(torch.tanh(self.up(x)) * self.gain) + self.frozen(x)
        logits = self.head(x)
        if last:
            logits = logits + self.sometimes
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float().to(self.gain.dtype), ids[:, 1:].flatten())


@functools.cache
def original():
    torch.manual_seed(3)
    return Model()


def model(dtype=torch.float64):
    return copy.deepcopy(original()).to(dtype)


def rows(step, micro, rank):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, VOCAB, (2, LENGTH), generator=generator)


def adam(groups):
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.05)


def gradient_of(optimizer, parameter):
    """This rank's part of a parameter's gradient: zeros elsewhere, None where it has no part or none was computed.

    In the parameter's shape and the master weights' dtype; summed over the group it is the whole gradient.
    """
    for _, held in optimizer._places:
        if held.parameter is parameter and held.master is not None and held.master.grad is not None:
            whole = held.master.grad.new_zeros(parameter.numel())
            whole[held.mine.source] = held.master.grad
            return whole.view(parameter.shape)
    return None
