"""Files of a tokenizer that brings Python code (`auto_map` in tokenizer_config.json).

They are read as text. Nothing of them is imported here.
"""

from __future__ import annotations

import ast
import fnmatch
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

CONFIG = "tokenizer_config.json"
# What may lie next to a model and is no part of a tokenizer, whose vocabulary may have any name.
_OTHERS = (
    "*.safetensors", "*.index.json", "*.py", "*.gguf", "*.onnx*", "*.h5", "*.msgpack", "*.pt", "*.pth", "*.ckpt",
    "pytorch_model*", "model.*", "adapter_*", "consolidated*", "training_args.bin", "optimizer*", "scheduler*", "*.md",
    "config.json", "rewrite.json", ".*",
)  # fmt: skip


def own_code(directory: str | Path) -> list[str]:
    """The classes that a tokenizer names as its code, as `module.Class`; those of another repository as
    `repository--module.Class`. None of most tokenizers."""
    try:
        table = json.loads((Path(directory) / CONFIG).read_text(encoding="utf-8"))
        named = table.get("auto_map", ())
        named = named.get("AutoTokenizer") if isinstance(named, Mapping) else named
    except (OSError, ValueError, AttributeError):
        return []
    return [name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)]


def code_files(directory: str | Path) -> list[Path]:
    """The Python files in a directory that its tokenizer's classes are in, and those that these import from there."""
    root, files = Path(directory), list[Path]()
    wanted = [name.rpartition(".")[0] for name in own_code(root) if "--" not in name]
    while wanted:
        path = root / f"{wanted.pop()}.py"
        if path not in files and path.is_file():
            files.append(path)
            wanted += _imported(path)
    return sorted(files)


def vocabulary_files(directory: str | Path) -> Iterator[Path]:
    """The files of a directory that its tokenizer's own code may read; none where it has no code."""
    for path in sorted(Path(directory).iterdir()) if own_code(directory) else ():
        if path.is_file() and not any(fnmatch.fnmatch(path.name, pattern) for pattern in _OTHERS):
            yield path


def _imported(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            yield from [node.module.partition(".")[0]] if node.module else [alias.name for alias in node.names]
