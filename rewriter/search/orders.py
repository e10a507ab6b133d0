"""Orders of heads and channels for one placement: what `permute` is given, found on the part that it changes alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rewriter.analysis.permutable_units import permutable_units
from rewriter.passes.permute import moved_units, order_of
from rewriter.search.computed import Part
from rewriter.search.streamed_weights import Overlaid
from rewriter.search.tails import Tails
from rewriter.verify.affinity import Arranging, Recording, exits_of, reordered
from rewriter.verify.sensitivity import between, given_names

Orders = Mapping[str, str]
"""By path of a block, the rank of each of its units, as `Permute.ranks` has it."""


class Arranger:
    """Finds orders on `windows`, int64 [N, T], all of which go through a part at once."""

    def __init__(self, tails: Tails, windows: torch.Tensor) -> None:
        self.tails, self.windows = tails, windows
        self._exits, _ = exits_of(tails.computed.original)
        self._blocks = {
            block.path: block for block in permutable_units(tails.computed.original) if block.reason is None
        }
        self._values: dict[int, torch.Tensor] = {}

    @property
    def possible(self) -> bool:
        """Whether any block of the model has units that could change places."""
        return any(exit.block.count > self.tails.computed.ranks for exit in self._exits.values())

    @torch.no_grad()
    def order(self, part: Part) -> dict[str, str]:
        """The order for a part: by block, the rank of each unit; empty where none moves."""
        computed = self.tails.computed
        values = self._streams()
        given = {name: values[place] for name, place in part.given.items()}
        places = [computed.boundary(part.start)]
        same = between(computed.original, places, computed.boundary(part.end))
        recording = Recording(same, self.tails.weights, set(self._exits))
        recording.run(self.windows, given={given_names(places)[0]: values[places[0]]})
        within = {path: exit for path, exit in self._exits.items() if path in recording.read}
        arranging = Arranging(part.program, Overlaid(self.tails.weights), recording, within, lambda *_: None)
        arranging.run(self.windows, given=given)
        return {path: ranks for path, ranks in arranging.assigned.items() if moved_units(ranks)}

    def weights(self, orders: Orders) -> Mapping[str, torch.Tensor]:
        """The weights with their units in these orders."""
        if not orders:
            return self.tails.weights
        found = Overlaid(self.tails.weights)
        for path, ranks in orders.items():
            found.update(reordered(found, self._blocks[path], order_of(ranks)))
        return found

    def _streams(self) -> dict[int, torch.Tensor]:
        """The original's stream values, [N, T, D], of all windows."""
        if not self._values:
            each = [dict(self.tails.streams(ids)) for ids in self.windows]
            self._values = {place: torch.cat([values[place] for values in each]) for place in each[0]}
        return self._values
