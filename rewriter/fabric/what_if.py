"""Changes of a delay model and of what overlap costs, as text: what if all-reduces took 5 µs longer, and ranks were
never late?"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from rewriter.common.errors import RewriterError, did_you_mean
from rewriter.fabric.calls import KINDS, Call, Delay, DelayModel, Kind
from rewriter.fabric.overlap import SECONDS_OF, SHARES_OF, OverlapCosts

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(?P<number>[0-9]+(?:\.[0-9]*)?(?:e[-+]?[0-9]{1,2})?|\.[0-9]+)"
_CHANGE = re.compile(
    rf"(?:x{_NUMBER}|{_NUMBER.replace('number', 'percent')}%"
    rf"|(?P<sign>[-+]?){_NUMBER.replace('number', 'seconds')}(?P<unit>ns|us|µs|μs|ms|s))"
)
_LARGEST = 1e6  # seconds or times; more would not be finite for long

Term = Literal["crossing", "order", "contention", "jitter", "clocks", "step"]
Target = Kind | Literal["latency", "bandwidth", "kernels"] | Term
TERMS: tuple[Term, ...] = get_args(Term)
_FACTORS = ("bandwidth", "kernels")  # what changes by a factor only
_TARGETS: tuple[str, ...] = (*KINDS, "latency", *_FACTORS, *TERMS)
ROOFLINE = "roofline"
_EXAMPLES = {"crossing": "2us", "order": "100%", "contention": "40%", "jitter": "5us", "clocks": "10%", "step": "20us"}


@dataclass(frozen=True)
class DelayChange:
    """One change: to `scale` times, or by `add` seconds, or to `value` seconds, as the one that is given says.

    Of a kind of collective: its seconds; what is added is latency, which other groups on the link need not wait for.
    Of "latency": the part of every collective that is no transfer. Of "bandwidth": `scale` only; transfers take
    1 / scale times as long. Of "kernels": `scale` times as long; None, written kernels=roofline: none are measured. Of
    a term of `OverlapCosts`: `scale` times as much, `value` seconds, or the `share` given.
    """

    target: Target
    scale: float | None = None
    add: float | None = None
    value: float | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str) -> DelayChange:
        """Raises RewriterError, naming what is wrong, for what is not TARGET=CHANGE."""
        name, equals, written = text.partition("=")
        name, written = name.strip().lower().replace("-", "_"), written.strip().lower()

        def fail(why: str) -> RewriterError:
            return RewriterError(f"--what-if {text!r:.60}: {why}")

        if not equals:
            raise fail("no `=`. Write e.g. all_reduce=+5us or bandwidth=x0.5.")
        if name not in _TARGETS:
            raise fail(f"unknown {name!r:.40}. {did_you_mean(name, _TARGETS)}")
        if (name, written) == ("kernels", ROOFLINE):
            return cls("kernels")
        parts = _CHANGE.fullmatch(written)
        if parts is None:
            why = "has no unit" if re.fullmatch(r"[-+]?[0-9.]+", written) else "is no change"
            raise fail(f"{written!r:.40} {why}; write +5us, -5us, x1.5 or 20us (units: ns, us, ms, s).")
        target = cast(Target, name)
        if parts["number"] is not None:
            scale = float(parts["number"])
            if name == "bandwidth" and scale < 1 / _LARGEST:
                raise fail("a bandwidth of nothing; take a factor above 0.")
            if scale > _LARGEST:
                raise fail(f"more than {_LARGEST:.0f} times.")
            return cls(target, scale=scale)
        if parts["percent"] is not None:
            if name not in TERMS or not SHARES_OF.get(name):
                raise fail(f"{name} is no share; write it as a factor, x0.5, or as seconds, 20us.")
            return cls(target, share=float(parts["percent"]) / 100)
        if name in TERMS and (parts["sign"] or not SECONDS_OF.get(name)):
            raise fail(f"{name} changes by a factor or to a value: {name}=x0, {name}={_EXAMPLES[name]}.")
        if name in _FACTORS:
            raise fail(f"{name} changes by a factor: {name}=x0.5.")
        seconds = float(parts["seconds"]) * _UNITS[parts["unit"]]
        if seconds > _LARGEST:
            raise fail(f"more than {_LARGEST:.0f} seconds.")
        if parts["sign"]:
            return cls(target, add=-seconds if parts["sign"] == "-" else seconds)
        return cls(target, value=seconds)

    def applied(self, call: Call, delay: Delay) -> Delay:
        """`delay` of `call` after this change. Never below 0."""
        latency = delay.seconds - delay.transfer
        if self.target == "bandwidth":
            transfer = delay.transfer / (self.scale or 1.0)
            return replace(delay, seconds=latency + transfer, transfer=transfer)
        if self.target == "latency":
            return replace(delay, seconds=self._of(latency) + delay.transfer)
        if self.target != call.kind:
            return delay
        if self.add is None:
            return delay.lasting(self._of(delay.seconds))
        seconds = self._of(delay.seconds)
        return replace(delay, seconds=seconds, transfer=min(delay.transfer, seconds))

    def _of(self, seconds: float) -> float:
        if self.value is not None:
            return self.value
        return max(0.0, seconds * (1.0 if self.scale is None else self.scale) + (self.add or 0.0))


@dataclass(frozen=True)
class WhatIf:
    """`model` with `changes`, one after another. Changes do not apply to a group of one rank."""

    model: DelayModel
    changes: tuple[DelayChange, ...]

    @classmethod
    def parse(cls, model: DelayModel, texts: Iterable[str]) -> WhatIf:
        """`texts`: changes, each also several with commas between. Raises RewriterError for one that is none."""
        parts = [part for text in texts for part in text.split(",")]
        return cls(model, tuple(DelayChange.parse(part) for part in parts))

    @property
    def measured_kernels(self) -> bool:
        """True where measured kernels may stand for a roofline's."""
        return not any(change.target == "kernels" and change.scale is None for change in self.changes)

    @property
    def kernels(self) -> float:
        """Factor by which kernels take longer."""
        return math.prod(change.scale for change in self.changes if change.target == "kernels" and change.scale)

    def overlap(self, usual: OverlapCosts) -> OverlapCosts:
        """Costs of overlap after these changes."""
        for change in self.changes:
            if change.target in TERMS and change.scale is not None:
                usual = usual.times(change.target, change.scale)
            elif change.target in TERMS:
                usual = usual.given(change.target, seconds=change.value, share=change.share)
        return usual

    def delay(self, call: Call) -> Delay:
        delay = self.model.delay(call)
        if call.size < 2:
            return delay
        for change in self.changes:
            delay = change.applied(call, delay)
        return delay
