"""The rest of a cluster, emulated at the collective boundary: the backend "emulated" of torch.distributed.

Real ranks run an unmodified program; what the others would do in a collective is replaced by values of a world of
uniform ranks, and by the time that a model of delays gives (`rewriter.fabric`). Importing this registers the backend.
"""

from __future__ import annotations

from rewriter.emulation.backend import register
from rewriter.emulation.config import EmulationConfig

__all__ = ["EmulationConfig", "register"]

register()
