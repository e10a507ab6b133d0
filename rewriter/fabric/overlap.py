"""Costs of overlap, beyond what kernels and collectives take alone: figures with their sources.

Each term is a figure of `OverlapCosts`; `--what-if TERM=x0` switches it off, `TERM=x2` doubles it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from statistics import NormalDist

_ORDINARY = NormalDist()

SOURCES = {
    "crossing": "a CUDA graph of a decode step that changes streams 69 times less is 70 µs shorter, 8 B300, "
    "sglang #32770",
    "crossing_eager": "about 1 µs to record an event and 1 to wait for it, cudarc #335",
    "order": "0: collectives run on streams of high priority, which a graph keeps; 1: each waits for a kernel",
    "contention": "computing beside collectives took 18.9 % longer on average, 40 % at most, on 4 H100, A100 and "
    "others, arXiv 2507.03114, abstract",
    "taken": "the SMs and the memory traffic that a collective takes, as the roofline says",
    "slowed": "assumed: what a transfer loses to kernels beside it; 0 to 30 % are plausible",
    "jitter": "assumed: 2 %; GPUs of one kind differ by 8 % in products (arXiv 2208.11035) and hardly in memory",
    "jitter_seconds": "single sums of 8 H100 take 3.6 µs more than in a loop (16 to 64 KB; symm-mem-recipes #3 and "
    "Triton-distributed #57 against AIConfigurator's NCCL and vLLM): 1.42 standard deviations, as of the last of 8",
    "clocks": "1305 of 1410 MHz are held by an A100 at its power limit (HPL), glennklockwood.com/garden/peak-FLOPS; "
    "assumed of others",
    "step": "a replay of a graph, 1.7 to 3.5 µs as measured (benchmarks/predict/kernel_tables.py --replays), and the "
    "choice of a token: two passes over the logits",
}  # fmt: skip


@dataclass(frozen=True)
class OverlapCosts:
    """Costs of one device and its runtime. A figure of 0 is none.

    `crossing`, `crossing_eager`: seconds by which a kernel starts later after another stream's work, in a CUDA graph
    and outside. `order`: of the kernel that follows a collective's start, the part that the collective waits for.
    `contention`: by which share kernels next to a collective take longer, at least; the roofline may say more, of the
    SMs and the bandwidth that the collective takes, `taken` times. `slowed`: by which share a transfer next to kernels
    takes longer. `jitter`: standard deviation of a rank's kernels, as a share of their time; `jitter_seconds`:
    likewise, in seconds between two collectives, whichever kernels run. `clocks`: by which share kernels bound
    by arithmetic slow down at the power limit. `step`: seconds between two passes of a graph.
    """

    crossing: float = 1e-6
    crossing_eager: float = 2e-6
    order: float = 0.0
    contention: float = 0.189
    taken: float = 1.0
    slowed: float = 0.1
    jitter: float = 0.02
    jitter_seconds: float = 2.5e-6
    clocks: float = 0.08
    step: float = 10e-6

    def skew(self, ranks: int, computed: float) -> float:
        """Seconds from a typical rank's arrival at a collective to the last one's, after `computed` seconds of kernels.

        The largest of `ranks` normal deviates is expected at Φ⁻¹((n - 3/8) / (n + 1/4)) (Blom 1958).
        """
        if ranks < 2:
            return 0.0
        deviation = math.hypot(self.jitter * computed, self.jitter_seconds)
        return _ORDINARY.inv_cdf((ranks - 0.375) / (ranks + 0.25)) * deviation

    def times(self, term: str, factor: float) -> OverlapCosts:
        """With what goes by a term's name multiplied."""
        return replace(self, **{name: getattr(self, name) * factor for name in _FIGURES.get(term, (term,))})

    def given(self, term: str, *, seconds: float | None = None, share: float | None = None) -> OverlapCosts:
        """With a term's seconds, or its share, as given."""
        given = {} if seconds is None else dict.fromkeys(SECONDS_OF[term], seconds)
        return replace(self, **given, **({} if share is None else dict.fromkeys(SHARES_OF[term], share)))


SHARES = ("order", "contention", "taken", "slowed", "jitter", "clocks")
"""The figures that are shares; the others are seconds."""

_FIGURES = {
    "crossing": ("crossing", "crossing_eager"),
    "contention": ("contention", "taken", "slowed"),
    "jitter": ("jitter", "jitter_seconds"),
}
SECONDS_OF = {"crossing": ("crossing", "crossing_eager"), "jitter": ("jitter_seconds",), "step": ("step",)}
SHARES_OF = {name: (name,) for name in ("order", "contention", "jitter", "clocks")}
"""Figures that a term of `--what-if` sets where it is given as seconds, and as a share."""

NONE = OverlapCosts(**({field.name: 0.0 for field in fields(OverlapCosts)} | {"taken": 1.0}))
"""Nothing is known: of devices whose measurements hold what there is (CPUs)."""
