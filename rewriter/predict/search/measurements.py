"""Effects of mixes on windows of text, measured on the weights, each once: a file keeps it for another search."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rewriter.check.drift import available_memory
from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.predict.search.choices import REWRITES, STANDARD, Mix, Part
from rewriter.predict.search.computed import ChangedPart, Computed, WindowChange
from rewriter.predict.search.result import Rise, rise_of
from rewriter.predict.search.texts import Report, Text
from rewriter.weights import Checkpoint
from rewriter.weights.streaming import KeptTensors

_AT_ONCE = 48  # mixes whose streams are computed together


class Store:
    """Values by key, in lines of `directory`/measured-JOB.jsonl, where JOB is a hash of what they depend on; without a
    directory, in memory. A line that was cut off is not read.

    Raises RewriterError where the directory cannot be made, its file not be written, or a line is no JSON.
    """

    def __init__(self, directory: Path | None, job: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = {}
        name = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:16]
        self.path = None if directory is None else directory / f"measured-{name}.jsonl"
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            data = self.path.read_bytes() if self.path.exists() else b""
            self.path.write_bytes(whole := data[: data.rfind(b"\n") + 1])
            for line in whole.splitlines():
                self.values |= json.loads(line)
        except OSError as error:
            why = error.strerror or error
            raise RewriterError(f"--state {directory}: {why}. Name a directory that can be written") from None
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
        self.expressions = {name: parameter.expression for name, parameter in program.parameters.items()}
        lacking, source = [name for name, known in self.expressions.items() if known is None], program.source
        if source.path is None or lacking:
            what = f"{lacking[0]} is not in the checkpoint" if source.path else "it has a config and no weights"
            raise RewriterError(
                f"{source.path or source.model_type}: {what}, and a rise in loss is measured on the weights. Give a "
                "directory with config.json and safetensors"
            )
        self.checkpoint = Checkpoint.open(source.path)
        self.kept = KeptTensors(self._read, available_memory() // 3 if limit is None else limit)

    def _read(self, name: str) -> torch.Tensor:
        expression = self.expressions[name]
        assert expression is not None
        tensor = self.checkpoint.evaluate(expression)
        return tensor.float() if tensor.is_floating_point() else tensor

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.kept(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.expressions)

    def __len__(self) -> int:
        return len(self.expressions)


@dataclass
class Measurements:
    """Measurements of one model on one text. Those in the `store` are not made again. `refused`: by rewrite that
    applies to no layer, or not to all, why not."""

    computed: Computed
    text: Text
    store: Store
    refused: dict[str, str] = field(default_factory=dict)

    def alone(self, report: Report = lambda *_: None) -> dict[Part, float]:
        """KL(original ‖ rewritten) of every rewrite in every layer that it applies to, alone, on the first window of
        the calibration text: nats per token, above 0. For the prompt alone, not in the last layer, most of which is
        left out for tokens of a prompt anyway."""
        changed: dict[Mix, ChangedPart | None] = {}
        for name, rewrite in REWRITES.items():
            for start in range(self.computed.layers - rewrite.layers + 1 - rewrite.prompt):
                mix = Mix((Part(start, name),))
                try:
                    changed[mix] = self.computed.part(mix)
                except RewriterError as error:
                    self.refused.setdefault(name, str(error))
        changes = self._changes(changed, self.text.calibration[:1], "alone", report)
        return {mix.parts[0]: max(c.divergence / c.tokens, 1e-7) for mix, (c,) in changes.items()}

    def rises(self, mixes: Sequence[Mix], report: Report = lambda *_: None, held_out: bool = False) -> dict[Mix, Rise]:
        """The rise in loss of each mix on the calibration text, or on what was held out. Ranks that share tokens
        compute the same as others."""
        windows, what = (self.text.held_out, "held out") if held_out else (self.text.calibration, "mix")
        plain = {mix: replace(mix, base=STANDARD) for mix in mixes}
        changes = self._changes({mix: None for mix in plain.values() if mix.parts}, windows, what, report)
        loss, exact = self.loss(held_out), [WindowChange(0.0, 0.0, 1, 1)]
        return {mix: rise_of(changes.get(same, exact), loss, self.text.own) for mix, same in plain.items()}

    def loss(self, held_out: bool = False) -> float:
        """The original's loss, nats per token."""
        key, windows = ("loss held out", self.text.held_out) if held_out else ("loss", self.text.calibration)
        if key not in self.store.values:
            total = sum(self.computed.loss(ids) for ids in windows)
            self.store.put({key: total / windows[:, 1:].numel()})
        return float(self.store.values[key])

    def _changes(
        self, mixes: Mapping[Mix, ChangedPart | None], windows: torch.Tensor, what: str, report: Report
    ) -> dict[Mix, list[WindowChange]]:
        """Effect of each mix, whose changed part may be given, on each of `windows`, int64 [N, T]."""
        keys = {mix: f"{what} {mix.key}" for mix in mixes}
        missing = [mix for mix, key in keys.items() if key not in self.store.values]
        for first in range(0, len(missing), _AT_ONCE):
            some, made = missing[first : first + _AT_ONCE], []
            parts = [mixes[mix] or self.computed.part(mix) for mix in some]
            for n, ids in enumerate(windows):
                report(first + len(some) * n / len(windows), len(missing))
                made.append(self.computed.changes(parts, ids))
            self.store.put({keys[mix]: changes for mix, *changes in zip(some, *made, strict=True)})
        return {mix: [WindowChange(*change) for change in self.store.values[key]] for mix, key in keys.items()}
