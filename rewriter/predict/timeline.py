"""An event-driven simulation of one rank's streams: what runs when, and how long the compute stream stands idle for it.

One compute stream, one communication stream per mesh axis, and the host, which launches everything in the order of the
steps. The rules are those of torch's streams:

- a kernel starts when the kernel before it on its stream has ended and the host has launched it;
- a collective starts when the compute stream has finished what was launched before it, and its own stream is free;
  its transfer then waits for links that other groups hold (`fabric.Links`);
- at an await the compute stream waits for the collective's end.

While collectives hold SMs and memory bandwidth, kernels run slower (`roofline`). The rank is a typical one: the last of
its group arrives at a collective by `OverlapCosts.skew` later, and the collective starts then. What depends on another
stream starts by `OverlapCosts.crossing` later.

Idle time of the compute stream is the host's as far as the next kernel was not launched yet; beyond that it
is exposed communication, while a collective ran that the stream waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rewriter.fabric import Call, Delay, Links
from rewriter.predict.kernel_cost import Kernel
from rewriter.predict.kernel_time import ALONE, Contention, Rates, measured_seconds, seconds
from rewriter.predict.results import Phase, Span
from rewriter.predict.steps import Begin, Step, TimelineRun

SET_ASIDE = 0.65  # of the L2 cache for weights: 84 of 128 MB on an RTX PRO 6000 (local-inference-lab/vllm #578)

Delays = Callable[[Begin, Call], Delay]


@dataclass
class KernelDurations:
    """Durations of kernels on a device of `rates`; those of equal layers are asked once."""

    rates: Rates
    known: dict[tuple[int, Contention], tuple[float, float]] = field(default_factory=dict)
    held: list[tuple[Kernel, ...]] = field(default_factory=list)  # keeps keys' ids from being used again
    shares: dict[int, float] = field(default_factory=dict)
    rests: dict[int, tuple[Kernel, ...]] = field(default_factory=dict)

    def of(self, kernels: tuple[Kernel, ...], beside: Contention = ALONE) -> tuple[float, float]:
        """(D, C): the kernels' time on the device, and how long after the host begins to launch them the last one ends
        at the earliest, if the device is free: max over j of (j + 1) · launch + the time of kernels j and later."""
        key = (id(kernels), beside)
        if key not in self.known:
            self.held.append(kernels)
            alone, constant = 0.0, 0.0
            for i in range(len(kernels) - 1, -1, -1):
                alone += seconds(kernels[i], self.rates, beside)
                constant = max(constant, (i + 1) * self.rates.launch + alone)
            self.known[key] = (alone, constant)
        return self.known[key]

    def without_skew(self) -> KernelDurations:
        """The same kernels, of ranks that come together."""
        rates = replace(self.rates, overlap=self.rates.overlap.times("jitter", 0.0))
        return KernelDurations(rates, self.known, self.held, self.shares, self.rests)

    def rest(self, kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        """All but the first, the same object each time."""
        if id(kernels) not in self.rests:
            self.held.append(kernels)
            self.rests[id(kernels)] = kernels[1:]
        return self.rests[id(kernels)]

    def measured(self, kernels: tuple[Kernel, ...]) -> float:
        """The part of the kernels' time on the device that was measured."""
        if id(kernels) not in self.shares:
            self.held.append(kernels)
            self.shares[id(kernels)] = sum(measured_seconds(kernel, self.rates) for kernel in kernels)
        return self.shares[id(kernels)]


@dataclass(frozen=True, slots=True)
class _Busy:
    start: float
    end: float
    beside: Contention
    nbytes: int


class Timeline:
    """Runs steps once. `delays` says what each call of a collective takes; `record` keeps spans. `prefetch`: while a
    sum is waited for at once, the next kernels' weights are read into the cache, which takes those of so many
    seconds."""

    def __init__(self, durations: KernelDurations, delays: Delays, record: bool = True, prefetch: float = 0.0) -> None:
        self.durations, self.delays, self.record, self.prefetch = durations, delays, record, prefetch
        self.fetched = 0.0  # seconds of the next kernels' reading that were hidden behind a sum
        self.launch, self.overlap = durations.rates.launch, durations.rates.overlap
        self.crossing = self.overlap.crossing_eager if self.launch else self.overlap.crossing
        self.since = 0.0  # `compute` when the last collective began: what ranks drift apart in
        self.next: Step | None = None
        self.normed = False  # whether the last collective did what the next kernel is for
        self.now = 0.0  # when the compute stream has done what it was given
        self.host = 0.0  # until when the host has been launching
        self.links = Links()
        self.streams: dict[str, list[_Busy]] = {}
        self.ends: dict[Begin, float] = {}
        self.awaited: list[Begin] = []  # since the last kernel
        self.active: list[_Busy] = []  # what may still slow kernels down
        self.compute = self.communication = self.exposed = 0.0
        self.by_layer: dict[int, float] = {}
        self.kernels = self.collectives = 0
        self.flops, self.weight_bytes, self.measured = 0.0, 0, 0.0
        self.spans: list[Span] = []

    def run(self, steps: Sequence[Step]) -> float:
        """Seconds of the steps, to the end of every stream."""
        for step, self.next in zip(steps, [*steps[1:], None], strict=True):
            if isinstance(step, TimelineRun):
                self._run(step)
            elif isinstance(step, Begin):
                self._begin(step)
            else:
                self.awaited.append(step.begin)
        self._wait(self.host)
        between = 0.0 if self.launch else self.overlap.step
        return max([self.now, *(stream[-1].end for stream in self.streams.values())]) + between

    def phase(self, steps: Sequence[Step]) -> Phase:
        seconds = self.run(steps)
        return Phase(
            seconds=seconds,
            compute_seconds=self.compute,
            communication_seconds=self.communication,
            exposed_seconds=self.exposed,
            exposed_by_layer=dict(sorted(self.by_layer.items())),
            spans=tuple(sorted(self._marked(), key=lambda s: (s.start, s.lane, s.stream))),
            host_seconds=max(0.0, seconds - self.compute - self.exposed),
            flops=self.flops,
            weight_bytes=self.weight_bytes,
            kernels=self.kernels,
            collectives=self.collectives,
            measured_seconds=self.measured,
        )

    def _marked(self) -> list[Span]:
        """The spans, those of communication marked where the compute stream stands idle for them."""
        idle = [s for s in self.spans if s.exposed]
        marked, first = [], 0
        for span in sorted(self.spans, key=lambda s: s.start):
            if span.lane == "communication":
                while first < len(idle) and idle[first].end <= span.start:
                    first += 1
                if any(i.start < span.end and i.end > span.start for i in idle[first : first + 2]):
                    span = replace(span, exposed=True)
            marked.append(span)
        return marked

    # --- the compute stream ---

    def _run(self, step: TimelineRun) -> None:
        if self.normed:
            self.normed = False
            if not (rest := self.durations.rest(step.kernels)):
                return
            step = TimelineRun(step.name, step.layer, rest)
        alone, constant = self.durations.of(step.kernels)
        if self.fetched:
            read = sum(kernel.weight_bytes for kernel in step.kernels) / self.durations.rates.bandwidth
            spared = min(self.fetched, read, alone / 2)
            alone, self.fetched = alone - spared, self.fetched - spared
        self._wait(self.host + self.launch)
        start = self.now
        end = self._beside(step.kernels, start, alone) if self.active else start + alone
        working = end - start
        # where kernels wait for the host, slower ones end as much later
        self.now = max(end, self.host + constant + working - alone)
        self.host += len(step.kernels) * self.launch
        self.compute += working
        self.kernels += len(step.kernels)
        if self.record:
            self.spans.append(Span("compute", self.now - max(working, 0.0), self.now, step.name, step.layer))
            self.flops += sum(kernel.flops for kernel in step.kernels)
            self.weight_bytes += sum(kernel.weight_bytes for kernel in step.kernels)
            self.measured += self.durations.measured(step.kernels)

    def _beside(self, kernels: tuple[Kernel, ...], start: float, alone: float) -> float:
        """End of kernels that take `alone` seconds alone and begin at `start`, next to the collectives under way."""
        self.active = [busy for busy in self.active if busy.end > start]
        now, left = start, alone
        for busy in self.active:
            if busy.end <= now or alone <= 0.0:
                continue
            if busy.start > now:
                if left <= busy.start - now:
                    break
                left -= busy.start - now
                now = busy.start
            slower = self.durations.of(kernels, busy.beside)[0] / alone
            if busy.beside.blocks:
                slower = max(slower, 1.0 + self.overlap.contention)
            if left * slower <= busy.end - now:
                return now + left * slower
            left -= (busy.end - now) / slower
            now = busy.end
        return now + left

    def _wait(self, launched: float) -> None:
        """Let the compute stream wait for what was awaited. What comes next is launched at `launched`."""
        for begin in self.awaited:
            end = self.ends[begin] + (self.crossing if begin.aside else 0.0)
            if end <= self.now:
                continue
            since = max(self.now, launched)
            for busy in self._running(begin.axis, since, end):
                self._expose(begin, max(busy.start, since), min(busy.end, end))
            self.now = end
        self.awaited.clear()

    def _expose(self, begin: Begin, start: float, stop: float) -> None:
        """The compute stream stands idle for a collective."""
        if stop <= start:
            return
        layer = -1 if begin.layer is None else begin.layer
        self.exposed += stop - start
        self.by_layer[layer] = self.by_layer.get(layer, 0.0) + stop - start
        if self.record:
            self.spans.append(Span("compute", start, stop, begin.name, begin.layer, exposed=True))

    def _running(self, axis: str, since: float, end: float) -> list[_Busy]:
        """Work of the stream of an axis in [since, end], in order."""
        running = []
        for busy in reversed(self.streams[axis]):
            if busy.end <= since:
                break
            if busy.start < end:
                running.append(busy)
        return running[::-1]

    # --- communication streams ---

    def _begin(self, step: Begin) -> None:
        self.host += self.launch * len(step.parts)
        self._wait(self.host)
        stream = self.streams.setdefault(step.axis, [])
        ready = self.now + (self.crossing + self._behind_next() if step.aside else 0.0)
        now = max(ready, self.host, stream[-1].end if stream else 0.0)
        computed, self.since = self.compute - self.since, self.compute
        drifted = computed
        for part in step.parts:
            if isinstance(part, Kernel):
                took = seconds(part, self.durations.rates)
                busy, label = _Busy(now, now + took, Contention(0, part.nbytes / took), 0), part.name
            else:
                delay, label = self._delay(step, part, computed), part.kind.replace("_", "-")
                self.normed = delay.normed
                late = self.overlap.skew(part.size, drifted)
                drifted = 0.0
                _, end, self.links = self.links.occupy(now + late, delay)
                # waiting for a link or the last rank is communication as well
                busy = _Busy(now, end, _taken(delay, self.overlap.taken), part.nbytes)
                self.collectives += 1
            self.kernels += 1
            now = busy.end
            stream.append(busy)
            self.communication += busy.end - busy.start
            if busy.beside != ALONE:
                self.active.append(busy)
            if self.record:
                name = step.name if len(step.parts) == 1 else f"{step.name}: {label}"
                number = list(self.streams).index(step.axis)
                self.spans.append(
                    Span("communication", busy.start, busy.end, name, step.layer, False, number, busy.nbytes)
                )
        self.ends[step] = now
        if self.prefetch and not step.aside:
            self.fetched = min(self.prefetch, now - ready)

    def _delay(self, step: Begin, call: Call, computed: float) -> Delay:
        """Delay of a collective, slowed down by the kernels that run next to it: about as long as those before it."""
        delay, slowed = self.delays(step, call), self.overlap.slowed
        if not step.aside or not slowed:
            return delay
        more = slowed * min(delay.transfer, computed)
        return replace(delay, seconds=delay.seconds + more, transfer=delay.transfer + more)

    def _behind_next(self) -> float:
        """Seconds that a collective waits for the SMs of the kernel that is launched next to it."""
        if not self.overlap.order or not isinstance(self.next, TimelineRun):
            return 0.0
        return self.overlap.order * seconds(self.next.kernels[0], self.durations.rates)


def _taken(delay: Delay, share: float) -> Contention:
    """Share of the device that a collective takes from kernels; of GPUs `share` times that."""
    if delay.seconds <= 0.0:
        return ALONE
    bandwidth, cores = delay.memory_bytes / delay.seconds, delay.cpu_seconds / delay.seconds
    return Contention(math.ceil(delay.blocks * share), bandwidth * share, cores)
