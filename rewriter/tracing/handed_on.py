"""Values that layers return with their hidden state, for later layers: keys that an indexer chose, router states.

Its shapes are found by running the layers on meta, one after the other: some read what an earlier one put into a
mapping that all of them share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rewriter.tracing.interception import Recorded
from rewriter.tracing.model_errors import refused
from rewriter.tracing.shared_values import SharedValues, with_shared

Form = tuple[torch.Size, torch.dtype]


class HandedOn:
    """`places` in the tuples of layers are read by later ones; `of` is what each layer has there: its form, or None
    where it returns None."""

    def __init__(self, places: tuple[int, ...] = ()) -> None:
        self.places = places
        self.of: dict[nn.Module, dict[int, Form | None]] = {}
        self._alike: dict[Any, dict[int, Form | None]] = {}
        self._shared: dict[Any, Any] = {}  # what the layers that were run put into their mapping

    def find(self, layer: nn.Module, call: Recorded, alike: Callable[[], Any]) -> dict[int, Form | None]:
        """The values that `layer`, called so, hands on; of layers with one key `alike()` the first is run.

        Raises RewriterError where it cannot be run on meta.
        """
        if layer not in self.of:
            key = alike() if self.places else None
            if key not in self._alike:
                self._alike[key] = self._run(layer, call) if self.places else {}
            self.of[layer] = self._alike[key]
        return self.of[layer]

    def _run(self, layer: nn.Module, call: Recorded) -> dict[int, Form | None]:
        shared = SharedValues(self._shared)
        call = with_shared(call, shared)
        # shapes alone are read, and the widest of what depends on values stands for it
        widest = torch.fx.experimental._config.patch(  # type: ignore[attr-defined]
            meta_nonzero_assume_all_nonzero=True
        )
        with widest, refused(f"{type(layer).__name__} cannot be run to find the values that it hands on"):
            output = type(layer).forward(layer, *call.args, **call.kwargs)
        self._shared |= shared
        given = {place: output[place] for place in self.places}
        return {
            place: None if x is None else (x.shape, x.dtype)
            for place, x in given.items()
            if x is None or isinstance(x, torch.Tensor)
        }
