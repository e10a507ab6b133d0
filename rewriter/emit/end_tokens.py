"""Tokens that end a text of a model, and the one that fills, as transformers reads them from its files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rewriter.common.errors import RewriterError, shortened
from rewriter.common.files import read_json
from rewriter.common.text_settings import not_a_token, top_setting, vocabulary_size

GENERATION = "generation_config.json"


# settings of transformers' generation that choose other tokens, with the value that does not
_CHOOSING = {
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0, "num_beams": 1,
    "suppress_tokens": [], "begin_suppress_tokens": [], "bad_words_ids": [], "sequence_bias": {}, "stop_strings": [],
    "forced_bos_token_id": None, "forced_eos_token_id": None, "exponential_decay_length_penalty": None,
    "guidance_scale": 1.0,
}  # fmt: skip


def not_applied(directory: Path) -> list[str]:
    """Settings of generation_config.json that would choose other tokens, and are not applied, as "name = value"."""
    file = directory / GENERATION
    own = read_json(file, "Correct it, or download it again.") if os.path.lexists(file) else {}
    asked = {name: own.get(name) for name, nothing in _CHOOSING.items() if own.get(name) not in (None, nothing)}
    return [f"{name} = {shortened(repr(value))}" for name, value in asked.items()]


def end_tokens(directory: Path, config: Mapping[str, Any]) -> tuple[list[int], int]:
    """(numbers of the tokens that end a text, the one that fills): those of generation_config.json; where there is no
    such file those of config.json, in which the text model's own settings count where the top has none.

    Raises RewriterError, naming the file, for one that cannot be read, and for an end that is no token's number.
    """
    file, hint = directory / GENERATION, "Correct it, or download it again."
    own = read_json(file, hint) if os.path.lexists(file) else {}
    said, place = own.get("eos_token_id"), file
    if not file.is_file():
        said, place = top_setting(config, "eos_token_id"), directory / "config.json"
    numbers = [] if said is None else said if isinstance(said, list) else [said]
    if not all(type(number) is int for number in numbers):
        raise RewriterError(
            f"{place}: eos_token_id is {shortened(repr(said))}, expected a token's number or a list of them. {hint}"
        )
    filling = [own.get("pad_token_id", top_setting(config, "pad_token_id")), *numbers, 0]
    known = vocabulary_size(config)
    return numbers, next(n for n in filling if type(n) is int and not_a_token([n], known) is None)
