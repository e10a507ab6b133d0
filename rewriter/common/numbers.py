"""Numbers as text: for people three digits and a unit, for programs JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

BYTES = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def duration(seconds: float) -> str:
    """0.00412 as "4.12 ms"; nothing, and what is below any clock's tick, as "0"."""
    if abs(seconds) < 5e-12:
        return "0"
    factor, name = next((unit for unit in _SECONDS if abs(seconds) >= 0.9995 * unit[0]), (1e-9, "ns"))
    return f"{digits(seconds / factor)} {name}"


def digits(number: float) -> str:
    """Three of them: "1,230", "123", "12.3", "1.23", "0.12"."""
    size = abs(number)
    return f"{number:,.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"


def percent(part: float, whole: float) -> str:
    """A share: "38 %"; "–" of nothing."""
    return f"{100 * part / whole:.0f} %" if whole > 0 else "–"


def times(ratio: float) -> str:
    """A speedup: "1.31×"."""
    return f"{ratio:.2f}×"


def amount(number: int) -> str:
    """1_235_814_400 as "1.24 B"."""
    for unit, name in ((10**12, " T"), (10**9, " B"), (10**6, " M"), (10**3, " k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return str(number)


def size(number: int) -> str:
    """Bytes with a decimal unit."""
    for name, unit in BYTES.items():
        if unit > 1 and (number >= 10 * unit or (number >= unit and number % unit)):
            return f"{number / unit:,.2f} {name}"
    return f"{number:,} B"


def json_text(data: Any, **options: Any) -> str:
    """`data` as JSON that every reader takes (RFC 8259): null for a number that is not finite. `options`: of dumps."""
    return json.dumps(_finite(data), ensure_ascii=False, allow_nan=False, **options)


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {name: _finite(value) for name, value in data.items()}
    return [_finite(value) for value in data] if isinstance(data, list | tuple) else data
