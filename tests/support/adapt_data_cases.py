"""Files of training data, the shared tokenizer that reads them, and its special tokens."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from repository import TINY_LLAMA
from transformers import AutoTokenizer

# Token n < 256 is byte n, which is what makes expected rows easy to write down.
BOS, EOS, PAD = 256, 257, 258


CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(template: str | None = CHATML, **changes: Any) -> Any:
    loaded = AutoTokenizer.from_pretrained(TINY_LLAMA)
    loaded.chat_template, loaded.split_special_tokens = template, False
    for name, value in changes.items():
        setattr(loaded, name, value)
    return loaded


@functools.cache
def shared() -> Any:
    return tokenizer()


def written(tmp_path: Path, *examples: Any) -> Path:
    """A file of these examples: bytes as they are, anything else as JSON."""
    path = tmp_path / "train.jsonl"
    lines = [e if isinstance(e, bytes) else json.dumps(e, ensure_ascii=False).encode() for e in examples]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path
