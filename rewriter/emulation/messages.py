"""Messages between ranks that are all alike: what a rank receives is what it sends itself.

Programs begin receives before the sends that belong to them, or after; which belong together is not said. Here they
are those of one size and dtype, oldest first. What nothing was sent for is zeros.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_Likeness = tuple[int, torch.dtype]
_KEPT = 64  # sends that no receive belonged to


@dataclass
class MessageSource:
    """What a receive gets, as far as it is known."""

    tensor: Tensor | None = None

    def write(self, outputs: Sequence[Tensor]) -> None:
        """Fill the receive's tensors."""
        with torch.no_grad():
            for x in outputs:
                if self.tensor is None:
                    x.data.zero_()
                else:
                    x.data.copy_(self.tensor.data.reshape(x.shape))


class Mailbox:
    """The unmatched messages of a process group."""

    def __init__(self) -> None:
        self._sent: deque[weakref.ref[Tensor]] = deque(maxlen=_KEPT)
        self._expected: deque[tuple[weakref.ref[MessageSource], _Likeness]] = deque(maxlen=_KEPT)

    def send(self, x: Tensor) -> None:
        """This rank sends `x`, which is alive until its operation ends."""
        for index, (held, like) in enumerate(self._expected):
            source = held()
            if source is not None and _likeness(x) == like:
                source.tensor = x
                del self._expected[index]
                return
        self._sent.append(weakref.ref(x))

    def receive(self, x: Tensor) -> MessageSource:
        """This rank receives into `x`; what it gets may be known later."""
        for index, held in enumerate(self._sent):
            sent = held()
            if sent is not None and _likeness(sent) == _likeness(x):
                del self._sent[index]
                return MessageSource(sent)
        source = MessageSource()
        self._expected.append((weakref.ref(source), _likeness(x)))
        return source


def _likeness(x: Tensor) -> _Likeness:
    return x.numel(), x.dtype
