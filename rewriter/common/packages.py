"""This package, its version and place, and the packages that some commands need beyond: pyproject.toml's extras."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from rewriter.common.errors import RewriterError

VERSION = "0.1.0"
PACKAGE_PARENT = Path(__file__).resolve().parents[2]  # what PYTHONPATH needs in processes that import the package

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "adapt": ("accelerate", "datasets", "peft", "tensorboard"),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "serve": ("fastapi", "openai", "uvicorn"),  # what `transformers serve` asks for
}


def present(name: str) -> bool:
    """True where a package can be imported; it is not."""
    if name in sys.modules:
        return sys.modules[name] is not None
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def require(extra: str, what: str, *names: str) -> None:
    """Raise RewriterError, with the extra to install, unless the packages that `what` needs are here: all of the extra,
    or those of `names`."""
    if missing := [name for name in names or EXTRAS[extra] if not present(name)]:
        packages = f"package{'s' * (len(missing) > 1)} {', '.join(missing)}"
        raise RewriterError(f"{what} needs the {packages}. Install the extra: pip install 'rewriter[{extra}]'")
