"""Rewrites language models so that they communicate less when they are sharded.

    import rewriter as rw
    program = rw.trace("path/to/model")
    rewritten = rw.rewrite(program, "ladder-upper-half", tp=8)
    rw.save(rewritten, "out")

Every public name is imported on first use, so `import rewriter` imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rewriter.common.errors import RewriterError, VerificationError
from rewriter.common.packages import VERSION as __version__

if TYPE_CHECKING:
    from rewriter.api import load, rewrite, save
    from rewriter.ir import Program
    from rewriter.ir.simulate import simulate
    from rewriter.recipes import Recipe
    from rewriter.tracing import trace

__all__ = [
    "Program",
    "Recipe",
    "RewriterError",
    "VerificationError",
    "__version__",
    "load",
    "rewrite",
    "save",
    "simulate",
    "trace",
]

_HOME = {
    "Program": "rewriter.ir",
    "Recipe": "rewriter.recipes",
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
