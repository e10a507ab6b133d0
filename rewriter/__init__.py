"""Rewrites language models so that they communicate less when they are sharded.

    import rewriter as rw
    program = rw.trace("path/to/model")
    rewritten = rw.rewrite(program, "ladder-upper-half", tp=8)
    rw.save(rewritten, "out", options=rw.SaveOptions(dtype="bf16"))

Every public name is imported on first use, so `import rewriter` imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rewriter.common.errors import RewriterError, VerificationError
from rewriter.common.packages import VERSION as __version__

if TYPE_CHECKING:
    from rewriter.adapt.options import AdaptOptions
    from rewriter.api import load, rewrite, save
    from rewriter.common.run_context import RunContext
    from rewriter.convert.save_options import SaveOptions
    from rewriter.ir import Program
    from rewriter.ir.simulate import simulate
    from rewriter.passes.phases import both_wirings
    from rewriter.predict.workload import Cluster, Workload
    from rewriter.recipes import Recipe
    from rewriter.tracing import trace

__all__ = [
    "AdaptOptions",
    "Cluster",
    "Program",
    "Recipe",
    "RewriterError",
    "RunContext",
    "SaveOptions",
    "VerificationError",
    "Workload",
    "__version__",
    "both_wirings",
    "load",
    "rewrite",
    "save",
    "simulate",
    "trace",
]

_HOME = {
    "AdaptOptions": "rewriter.adapt.options",
    "Cluster": "rewriter.predict.workload",
    "Program": "rewriter.ir",
    "Recipe": "rewriter.recipes",
    "RunContext": "rewriter.common.run_context",
    "SaveOptions": "rewriter.convert.save_options",
    "Workload": "rewriter.predict.workload",
    "both_wirings": "rewriter.passes.phases",
    "load": "rewriter.api",
    "rewrite": "rewriter.api",
    "save": "rewriter.api",
    "simulate": "rewriter.ir.simulate",
    "trace": "rewriter.tracing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rewriter' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
