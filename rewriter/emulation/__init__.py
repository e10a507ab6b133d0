"""The rest of a cluster, emulated at the collective boundary: the backend "emulated" of torch.distributed.

Real ranks run an unmodified program; what the others would do in a collective is replaced by values of a world of
uniform ranks, and by the time that a model of delays gives (`rewriter.fabric`). Importing this registers the backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rewriter.emulation.backend import register

if TYPE_CHECKING:
    from rewriter.emulation.config import EmulationConfig

__all__ = ["EmulationConfig", "register"]

register()


def __getattr__(name: str) -> Any:
    """EmulationConfig when it is first asked for: the backend with a model of delays needs no pydantic."""
    if name == "EmulationConfig":
        from rewriter.emulation.config import EmulationConfig

        return EmulationConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
