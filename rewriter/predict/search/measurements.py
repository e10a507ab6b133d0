"""Effects of mixes on windows of text, measured on the weights, each once: a cache keeps it for another search."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rewriter.check.drift import available_memory
from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.predict.search.choices import FORMATS, REWRITES, Mix, PlacedRewrite, mix_of
from rewriter.predict.search.computed import ChangedPart, Computed, WindowChange
from rewriter.predict.search.result import Rise, rise_of
from rewriter.predict.search.texts import Text
from rewriter.weights import Checkpoint

_AT_ONCE = 48  # mixes whose streams are computed together


class Store:
    """Values by key, in lines of `directory`/measured-JOB.jsonl, where JOB is a hash of what they depend on; without a
    directory, in memory. A line that was cut off is not read.

    Raises RewriterError where the directory cannot be made, its file not be written, or a line is no JSON.
    """

    def __init__(self, directory: Path | None, job: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = {}
        self.path: Path | None = None
        if directory is None:
            return
        name = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:16]
        self.path = directory / f"measured-{name}.jsonl"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            data = self.path.read_bytes() if self.path.exists() else b""
            whole = data[: data.rfind(b"\n") + 1]
            self.path.write_bytes(whole)
        except OSError as error:
            raise RewriterError(
                f"--state {directory}: {error.strerror or error}. Name a directory that can be written"
            ) from None
        try:
            for line in whole.splitlines():
                self.values |= json.loads(line)
        except ValueError:
            raise RewriterError(
                f"{self.path}: a line of it is no JSON. Remove the file; it is measured again"
            ) from None

    def put(self, values: Mapping[str, Any]) -> None:
        """Keep values, plain data, on one line."""
        self.values |= values
        if self.path is not None and values:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dict(values), allow_nan=False) + "\n")


class StreamedWeights(Mapping[str, torch.Tensor]):
    """The full tensors of `program` (as traced) by runtime name in fp32, read when they are asked for; at most `limit`
    bytes are kept, by default a third of the memory that is free. Raises RewriterError for a program without weights.
    """

    def __init__(self, program: Program, limit: int | None = None) -> None:
        lacking = [name for name, p in program.parameters.items() if p.expression is None]
        if program.source.path is None or lacking:
            what = f"{lacking[0]} is not in the checkpoint" if program.source.path else "it has a config and no weights"
            raise RewriterError(
                f"{program.source.path or program.source.model_type}: {what}, and a rise in loss is measured on the "
                "weights. Give a directory with config.json and safetensors"
            )
        self.program, self.limit = program, available_memory() // 3 if limit is None else limit
        self._checkpoint = Checkpoint.open(program.source.path)
        self._kept: OrderedDict[str, torch.Tensor] = OrderedDict()

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._kept:
            expression = self.program.parameters[name].expression
            assert expression is not None
            tensor = self._checkpoint.evaluate(expression)
            self._kept[name] = tensor.float() if tensor.is_floating_point() else tensor
            while sum(kept.nbytes for kept in self._kept.values()) > self.limit and len(self._kept) > 1:
                self._kept.popitem(last=False)
        self._kept.move_to_end(name)
        return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.program.parameters)

    def __len__(self) -> int:
        return len(self.program.parameters)


@dataclass
class Measurements:
    """Measurements of one model on one text. Those in the `store` are not made again. `refused`: by rewrite that
    applies to no layer, or not to all, why not."""

    computed: Computed
    text: Text
    store: Store
    refused: dict[str, str] = field(default_factory=dict)
    _parts: dict[Mix, ChangedPart] = field(default_factory=dict)  # of single rewrites

    def applicable(self) -> list[Mix]:
        """Every rewrite of every layer that applies, and every format of messages of every layer, alone."""
        layers = self.computed.layers
        mixes = [
            (rewrite.name, mix_of([PlacedRewrite(start, rewrite.name)]))
            for rewrite in REWRITES
            for start in range(layers - rewrite.layers + 1)
        ]
        mixes += [(name, mix_of([], {layer: name})) for name in FORMATS for layer in range(layers)]
        for name, mix in mixes:
            try:
                self._parts[mix] = self.computed.part(mix)
            except RewriterError as error:
                self.refused.setdefault(name, str(error))
        return list(self._parts)

    def alone(self, mixes: Sequence[Mix], report: Callable[[float, float], None]) -> dict[Mix, WindowChange]:
        """Effect of each mix in the first window of the calibration text."""
        changes = self._changes(mixes, self.text.calibration[:1], "alone", report)
        return {mix: of_windows[0] for mix, of_windows in changes.items()}

    def rises(
        self, mixes: Sequence[Mix], report: Callable[[float, float], None] = lambda *_: None, held_out: bool = False
    ) -> dict[Mix, Rise]:
        """The rise in loss of each mix on the calibration text, or on what was held out. Ranks that share tokens
        compute the same as others."""
        windows, what = (self.text.held_out, "held out") if held_out else (self.text.calibration, "mix")
        functions = {mix: replace(mix, base=Mix.base) for mix in mixes}
        touched = list(dict.fromkeys(mix for mix in functions.values() if mix.touched))
        changes, loss = self._changes(touched, windows, what, report), self.loss(held_out)
        return {
            mix: rise_of(changes[own], loss, self.text.own) if own.touched else Rise(loss, 0.0, 0.0, 0.0)
            for mix, own in functions.items()
        }

    def loss(self, held_out: bool = False) -> float:
        """The original's loss, nats per token."""
        key, windows = ("loss held out", self.text.held_out) if held_out else ("loss", self.text.calibration)
        if key not in self.store.values:
            total = sum(self.computed.reference(ids).loss for ids in windows)
            self.store.put({key: total / (windows.shape[0] * (windows.shape[1] - 1))})
        return float(self.store.values[key])

    def _changes(
        self, mixes: Sequence[Mix], windows: torch.Tensor, what: str, report: Callable[[float, float], None]
    ) -> dict[Mix, list[WindowChange]]:
        """Effect of each mix on each of `windows`, int64 [N, T]."""
        keys = {mix: f"{what} {mix.key}" + (", on the rest of windows" if mix.phased else "") for mix in mixes}
        missing = [mix for mix, key in keys.items() if key not in self.store.values]
        for first in range(0, len(missing), _AT_ONCE):
            some = missing[first : first + _AT_ONCE]
            parts = [self._parts.get(mix) or self.computed.part(mix) for mix in some]
            made = []
            for n, ids in enumerate(windows):
                report(first + len(some) * n / len(windows), len(missing))
                made.append(self.computed.changes(parts, ids))
            by_mix = zip(some, zip(*made, strict=True), strict=True)
            self.store.put({keys[mix]: [asdict(change) for change in changes] for mix, changes in by_mix})
        return {mix: [WindowChange(**change) for change in self.store.values[key]] for mix, key in keys.items()}
