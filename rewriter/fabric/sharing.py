"""Groups that share a link: their transfers wait for each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rewriter.fabric.delays import Delay


@dataclass(frozen=True)
class Links:
    """Until when each link is taken, in seconds of the caller's clock. Immutable: `occupy` gives the state after.

    A link serves one transfer at a time, in the order of arrival. What a delay has beyond its transfer (latency,
    launches) overlaps with other groups' transfers:

        start = max(now, free[link] for each link of the delay);  end = start + seconds;
        free[link] = start + transfer
    """

    free: Mapping[str, float] = field(default_factory=dict)

    def occupy(self, now: float, delay: Delay) -> tuple[float, float, Links]:
        """(start, end, links after it) of an exchange whose last rank arrives at `now`."""
        start = max((self.free.get(link, now) for link in delay.links), default=now)
        start = max(start, now)
        taken = {**self.free, **dict.fromkeys(delay.links, start + delay.transfer)}
        return start, start + delay.seconds, Links(taken)
