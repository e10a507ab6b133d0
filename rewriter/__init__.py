"""Rewrites language models so that they communicate less when they are sharded.

    import rewriter as rw
    program = rw.trace("path/to/model")
    rewritten = rw.rewrite(program, "ladder-upper-half", tp=8)
    rewritten.save("out")

Every public name is imported on first use, so `import rewriter` imports neither torch nor transformers.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rewriter.errors import RewriterError, VerificationError

if TYPE_CHECKING:
    from rewriter.api import load, rewrite
    from rewriter.program import Program
    from rewriter.recipes import Recipe
    from rewriter.trace import trace
    from rewriter.verify.simulate import simulate

__version__ = "0.1.0"

__all__ = [
    "Program",
    "Recipe",
    "RewriterError",
    "VerificationError",
    "__version__",
    "load",
    "rewrite",
    "simulate",
    "trace",
]

_HOME = {
    "Program": "rewriter.program",
    "Recipe": "rewriter.recipes",
    "load": "rewriter.api",
    "rewrite": "rewriter.api",
    "simulate": "rewriter.verify.simulate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rewriter' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """`rewriter.trace` is the function, although a room of that name stands beside it.

    Importing a submodule sets it as an attribute of its package, which would replace the function by the room. A
    property without effect on setting keeps the name; `from rewriter.trace import …` does not read it.
    """

    @property
    def trace(self) -> Any:
        return import_module("rewriter.trace").trace

    @trace.setter
    def trace(self, room: ModuleType) -> None:
        pass


sys.modules[__name__].__class__ = _Package
