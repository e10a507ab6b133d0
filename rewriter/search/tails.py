"""What rewrites change, each alone, on a text: only what they change is computed, and what follows, many at a time.

The original is computed block by block. Each layer is followed by the residual streams of all variants that end there:
the layer's own one, and what every rewrite makes of it. They go through the rest of the original together, as one
batch, so that a layer's weights are read once. A mix is computed from its first rewritten layer on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch

from rewriter.common.text_settings import stream_width
from rewriter.ir import Program
from rewriter.search.computed import Computed, Part
from rewriter.search.losses import Change, Reference
from rewriter.verify.live_model import opaque_modules
from rewriter.verify.sensitivity import between, given_names
from rewriter.verify.simulate import RankValues, Simulator

Weights = Mapping[str, torch.Tensor]
_BATCH = 8  # sequences that go through a layer at a time
_VARIANTS = 1 << 29  # bytes of streams that are carried along
_KEPT = 1 << 29  # bytes of the original's predictions, and of its streams, that are kept between mixes


class Tails:
    """Measures parts of one model, whose full `weights` in fp32 are given by runtime name."""

    def __init__(self, computed: Computed, weights: Weights) -> None:
        self.computed, self.weights = computed, weights
        original, layers = computed.original, computed.layers
        self.opaque = bool(opaque_modules(original))
        self.batch = 1 if self.opaque else _BATCH  # a live module computes for the tokens that it was given
        self._embedding = between(original, [], computed.boundary(0))
        self._blocks = [between(original, [i], i + 1) for i in range(computed.last)]
        self._layers = [between(original, [computed.boundary(n)], computed.boundary(n + 1)) for n in range(layers)]
        self._head = between(original, [computed.last])
        self._references: dict[bytes, Reference] = {}  # by window
        self._streams: dict[bytes, dict[int, torch.Tensor]] = {}

    # --- the original ---

    def streams(self, ids: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """(number, value [1, T, D]) of every value of the original's stream, in order. `ids`: int64 [T]."""
        value = self._run(self._embedding, ids[None], {})
        yield self.computed.boundary(0), value
        for place, block in enumerate(self._blocks):
            if place >= self.computed.boundary(0):
                value = self._run(block, ids[None], {given_names([place])[0]: value})
                yield place + 1, value

    def reference(self, ids: torch.Tensor, final: torch.Tensor) -> Reference:
        """What the original predicts, from its last stream value [1, T, D]."""
        return Reference(ids, self._logits(ids, final)[0])

    def _logits(self, ids: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        tokens = ids.expand(len(streams), len(ids))
        return self._run(self._head, tokens, {given_names([self.computed.last])[0]: streams})

    def _run(
        self, program: Program, ids: torch.Tensor, given: Mapping[str, torch.Tensor], weights: Weights | None = None
    ) -> torch.Tensor:
        out: RankValues = Simulator(program, self.weights if weights is None else weights).run(ids, given=given)
        return out[0]

    # --- each alone ---

    @torch.no_grad()
    def alone(
        self,
        parts: Sequence[tuple[Part, Weights]],
        ids: torch.Tensor,
        progress: Callable[[float], None] = lambda _: None,
    ) -> list[Change]:
        """What each part alone changes on one window, int64 [T]; each with the weights that it is computed with."""
        found: dict[int, Change] = {}
        of_a_stream = self._width(ids) * len(ids) * 4
        most = max(1, _VARIANTS // of_a_stream)
        order = sorted(range(len(parts)), key=lambda i: parts[i][0].end)
        for first in range(0, len(order), most):
            group = order[first : first + most]
            share = len(group) / len(order)
            done = first / len(order)
            found |= self._wave({i: parts[i] for i in group}, ids, partial(_forward, progress, done, share))
        return [found[i] for i in range(len(parts))]

    def _wave(
        self, parts: Mapping[int, tuple[Part, Weights]], ids: torch.Tensor, progress: Callable[[float], None]
    ) -> dict[int, Change]:
        computed = self.computed
        earliest = {
            end: min(p.start for p, _ in parts.values() if p.end >= end) for end in {p.end for p, _ in parts.values()}
        }
        kept: dict[int, torch.Tensor] = {}
        names: list[int] = []
        streams = torch.empty(len(parts), len(ids), self._width(ids))
        final = torch.empty(0)
        with threads(1 if self.opaque else torch.get_num_threads()) as pool:
            for place, value in self.streams(ids):
                kept[place] = final = value
                ended = [n for n in range(1, computed.layers + 1) if computed.boundary(n) == place]
                if not ended:
                    continue
                (layer,) = ended
                self._advance(pool, layer - 1, ids, streams[: len(names)])
                ready = [i for i, (part, _) in parts.items() if part.end == layer]
                made = [pool.submit(self._part, *parts[i], ids, kept) for i in ready]
                for i, stream in zip(ready, made, strict=True):
                    streams[len(names)] = stream.result()
                    names.append(i)
                later = [start for end, start in earliest.items() if end > layer]
                needed = computed.boundary(min(later)) - 1 if later else place
                kept = {number: kept[number] for number in kept if number >= min(needed, place)}
                progress(layer / (computed.layers + 2))
            reference = self.reference(ids, final)
            changes = pool.map(
                lambda n: [reference.change(x) for x in self._logits(ids, streams[n : n + 2])], range(0, len(names), 2)
            )
            return dict(zip(names, (change for pair in changes for change in pair), strict=True))

    def _advance(self, pool: ThreadPoolExecutor, layer: int, ids: torch.Tensor, streams: torch.Tensor) -> None:
        """All `streams`, [N, T, D], through one layer of the original, in place."""
        name = given_names([self.computed.boundary(layer)])[0]

        def through(first: int) -> None:
            batch = streams[first : first + self.batch]
            batch.copy_(self._run(self._layers[layer], ids.expand(len(batch), len(ids)), {name: batch}))

        list(pool.map(through, range(0, len(streams), self.batch)))

    def _part(
        self, part: Part, weights: Weights, ids: torch.Tensor, values: Mapping[int, torch.Tensor]
    ) -> torch.Tensor:
        given = {name: values[place] for name, place in part.given.items()}
        return self._run(part.program, ids[None], given, weights)[0]

    def _width(self, ids: torch.Tensor) -> int:
        if size := stream_width(self.computed.original.source.config):
            return size
        return int(next(self.streams(ids[:1]))[1].shape[-1])

    # --- a mix ---

    @torch.no_grad()
    def mixed(self, part: Part, weights: Weights, windows: torch.Tensor) -> list[Change]:
        """What a part changes on each of `windows`, int64 [N, T]."""
        with threads(1 if self.opaque else min(torch.get_num_threads(), len(windows))) as pool:
            return list(pool.map(lambda ids: self._mixed(part, weights, ids), windows))

    def _mixed(self, part: Part, weights: Weights, ids: torch.Tensor) -> Change:
        key = ids.numpy().tobytes()
        values = self._known(key, ids)
        value = self._part(part, weights, ids, values)[None]
        for layer in range(part.end, self.computed.layers):
            name = given_names([self.computed.boundary(layer)])[0]
            value = self._run(self._layers[layer], ids[None], {name: value})
        reference = self._references.get(key) or self.reference(ids, values[self.computed.last])
        if sum(r.nbytes for r in self._references.values()) + reference.nbytes <= _KEPT:
            self._references[key] = reference
        return reference.change(self._logits(ids, value)[0])

    def _known(self, key: bytes, ids: torch.Tensor) -> dict[int, torch.Tensor]:
        """The original's stream values in a window, by number."""
        if key not in self._streams:
            values = dict(self.streams(ids))
            size = sum(value.nbytes for value in values.values())
            if size * (len(self._streams) + 1) > _KEPT:
                return values
            self._streams[key] = values
        return self._streams[key]

    @torch.no_grad()
    def whole(self, program: Program, windows: torch.Tensor) -> list[Change]:
        """What a program over the same weights changes on each of `windows`, int64 [N, T], computed as a whole."""
        changes = []
        for ids in windows:
            *_, (_, final) = self.streams(ids)
            changes.append(self.reference(ids, final).change(self._run(program, ids[None], {})[0]))
        return changes

    @torch.no_grad()
    def loss(self, windows: torch.Tensor) -> float:
        """The original's loss on `windows`, int64 [N, T], nats per token."""
        total = 0.0
        for ids in windows:
            *_, (_, final) = self.streams(ids)
            total += self.reference(ids, final).loss
        return total / (windows.shape[0] * (windows.shape[1] - 1))


def _forward(progress: Callable[[float], None], begun: float, share: float, done: float) -> None:
    """Part of the work is done, which is a `share` of all and began at `begun`."""
    progress(begun + share * done)


@contextmanager
def threads(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Threads without gradients that share the cores: small operators of one do not wait until all cores are free."""
    cores = torch.get_num_threads()
    torch.set_num_threads(max(1, cores // workers))
    pool = ThreadPoolExecutor(workers, initializer=torch.set_grad_enabled, initargs=(False,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(cores)
