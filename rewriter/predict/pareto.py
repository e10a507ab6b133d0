"""Latency against throughput per GPU, over TP degrees and batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rewriter.predict.results import PredictedPoint

DEGREES, BATCHES = (1, 2, 4, 8), (1, 4, 16, 64)


def with_front(points: Sequence[PredictedPoint]) -> tuple[PredictedPoint, ...]:
    """The points with `front` set: of those that fit, no other is at least as good in both and better in one."""

    def beaten(point: PredictedPoint) -> bool:
        return any(
            other.fits
            and other.seconds_per_token <= point.seconds_per_token
            and other.tokens_per_second_per_gpu >= point.tokens_per_second_per_gpu
            and (other.seconds_per_token, other.tokens_per_second_per_gpu)
            != (point.seconds_per_token, point.tokens_per_second_per_gpu)
            for other in points
        )

    return tuple(replace(point, front=point.fits and not beaten(point)) for point in points)
