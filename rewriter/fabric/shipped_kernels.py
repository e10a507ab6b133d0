"""The files of measured kernels that ship; `kernel_tables` says what they hold."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.common.suggestions import did_you_mean

DATA = Path(__file__).parent / "data"
_PREFIX, _SUFFIX = "kernels-", ".json.gz"


@cache
def kernel_systems() -> tuple[str, ...]:
    """The systems whose kernels are shipped."""
    names = (path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX) for path in DATA.glob(f"{_PREFIX}*{_SUFFIX}"))
    return tuple(sorted(names))


def read(system: str) -> dict[str, Any]:
    """The content of a system's file. Raises RewriterError for a system that none is shipped of."""
    if system not in kernel_systems():
        raise RewriterError(
            f"kernels of {system!r:.60}: {did_you_mean(system, kernel_systems(), what='shipped')} Name one of them"
        )
    found: dict[str, Any] = json.loads(gzip.decompress((DATA / f"{_PREFIX}{system}{_SUFFIX}").read_bytes()))
    return found
