"""What is measured on the weights in a search, each thing once: rewrites alone, orders of units, mixes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from rewriter.common.errors import RewriterError
from rewriter.search.choices import FORMATS, REWRITES, Mix, Placement, mix_of
from rewriter.search.computed import Computed, Part, keep_shared
from rewriter.search.losses import Change, Rise, rise_of
from rewriter.search.orders import Arranger
from rewriter.search.store import Store
from rewriter.search.tails import Tails
from rewriter.search.texts import Text

Report = Callable[[float, float], None]
SCREENED = 128  # tokens of the first window, on which everything is measured that applies


@dataclass
class Measurements:
    """Of one model on one text. What is in the `store` is not measured again."""

    tails: Tails
    text: Text
    store: Store
    refused: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arranger = Arranger(self.tails, self.text.arranging)
        self._parts: dict[str, Part] = {}

    @property
    def computed(self) -> Computed:
        return self.tails.computed

    # --- what applies ---

    def applicable(self) -> list[Mix]:
        """Every rewrite of every layer that applies, alone; `refused` says of the others why not."""
        found: list[Mix] = []
        for rewrite in REWRITES:
            if rewrite.bound and self.computed.ranks == 1:
                self.refused[rewrite.name] = "it is bound to its ranks, and there is one"
                continue
            for start in range(self.computed.layers - rewrite.layers + 1):
                self._add(found, rewrite.name, mix_of([Placement(start, rewrite.name)]))
        for format in FORMATS if self.computed.ranks > 1 else ():
            for layer in range(self.computed.layers):
                self._add(found, format, mix_of([], {layer: format}))
        return found

    def _add(self, found: list[Mix], name: str, mix: Mix) -> None:
        try:
            self.part(mix)
            found.append(mix)
        except RewriterError as error:
            self.refused.setdefault(name, str(error))

    def part(self, mix: Mix) -> Part:
        """What differs under a mix; the order of units does not matter to it. Those of single rewrites are kept."""
        plain = replace(mix, placements=tuple(replace(p, ordered=False) for p in mix.placements), base=Mix.base)
        if plain.key in self._parts:
            return self._parts[plain.key]
        made = self.computed.part(plain)
        keep_shared(self.computed.known)
        if len(plain.placements) + len(plain.formats) == 1:
            self._parts[plain.key] = made
        return made

    # --- each alone ---

    def alone(self, mixes: Sequence[Mix], window: int, tokens: int, report: Report) -> dict[Mix, Change]:
        """What each of them changes in the first `tokens` tokens of a window of the calibration text."""
        ids = self.text.calibration[window, :tokens]
        keys = {mix: f"alone {window} {len(ids)} {mix.key}" for mix in mixes}
        missing = [mix for mix, key in keys.items() if key not in self.store]
        for first in range(0, len(missing), _AT_ONCE):
            some = missing[first : first + _AT_ONCE]
            parts = [(self.part(mix), self.weights(mix)) for mix in some]
            begun, share = first / len(missing), len(some) / len(missing)
            made = self.tails.alone(parts, ids, partial(_report, report, begun, share))
            self.store.put({keys[mix]: _plain(change) for mix, change in zip(some, made, strict=True)})
        return {mix: Change(*self.store[key]) for mix, key in keys.items()}

    # --- orders ---

    def orders(self, mixes: Sequence[Mix], report: Report) -> list[Mix]:
        """Those of single placements whose units get another order, with that order."""
        found = []
        for done, mix in enumerate(mixes):
            report(done, len(mixes))
            (placement,) = mix.placements
            key = f"order {placement}"
            if key not in self.store:
                self.store.put({key: self.arranger.order(self.part(mix))})
            if self.store[key]:
                found.append(mix_of([replace(placement, ordered=True)]))
        return found

    def order_of(self, mix: Mix) -> dict[str, str]:
        """By block, the rank of each unit, of the placements of a mix that are ordered."""
        found: dict[str, str] = {}
        for placement in mix.placements:
            if placement.ordered:
                found |= self.store[f"order {replace(placement, ordered=False)}"]
        return found

    def weights(self, mix: Mix) -> Mapping[str, torch.Tensor]:
        """What a mix computes with."""
        return self.arranger.weights(self.order_of(mix))

    # --- mixes ---

    def mixed(self, mix: Mix, held_out: bool = False) -> Rise:
        """The rise in loss of a mix on the calibration text, or on what was held out."""
        windows = self.text.held_out if held_out else self.text.calibration
        what = "held out" if held_out else "mix"
        loss = self.loss(held_out)
        function = replace(mix, base=Mix.base)  # ranks that share tokens compute the same, on every grid
        key = f"{what} {function.key}"
        if not function.touched and not function.keys:
            return Rise(loss, 0.0, 0.0, 0.0)
        if key not in self.store:
            if function.keys:
                made = self.tails.whole(self.computed.sharing(function), windows)
            else:
                made = self.tails.mixed(self.part(function), self.weights(function), windows)
            self.store.put({key: [_plain(change) for change in made]})
        return rise_of([Change(*change) for change in self.store[key]], loss, self.text.own)

    def loss(self, held_out: bool = False) -> float:
        """The original's loss, nats per token."""
        key = f"loss {'held out' if held_out else 'calibration'}"
        if key not in self.store:
            self.store.put({key: self.tails.loss(self.text.held_out if held_out else self.text.calibration)})
        return float(self.store[key])


def _report(report: Report, begun: float, share: float, done: float) -> None:
    report(begun + share * done, 1)


_AT_ONCE = 48  # variants of which the measurements are kept together


def _plain(change: Change) -> list[Any]:
    return [change.divergence, change.rise, change.tokens, change.predicted]
