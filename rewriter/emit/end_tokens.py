"""Which tokens end a text of a model, and which one fills: as transformers reads its files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rewriter.common.errors import RewriterError, shortened
from rewriter.common.files import read_json

GENERATION = "generation_config.json"


def end_tokens(directory: Path, config: Mapping[str, Any]) -> tuple[list[int], int]:
    """(numbers of the tokens that end a text, the one that fills): generation_config.json goes before config.json.

    Raises RewriterError, naming the file, for one that cannot be read, and for an end that is no token's number.
    """
    file, hint = directory / GENERATION, "Correct it, or download it again."
    own = read_json(file, hint) if os.path.lexists(file) else {}
    settings = {**config, **own}
    ends = settings.get("eos_token_id")
    numbers = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(type(number) is int for number in numbers):
        place = file if "eos_token_id" in own else directory / "config.json"
        said = shortened(repr(ends))
        raise RewriterError(f"{place}: eos_token_id is {said}, expected a token's number or a list of them. {hint}")
    filling = settings.get("pad_token_id")
    return numbers, filling if type(filling) is int else (numbers or [0])[0]
