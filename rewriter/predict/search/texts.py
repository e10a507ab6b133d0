"""Texts that a rise in loss is measured on: tokens in windows, some to choose by, some held out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rewriter.check.drift import CALIBRATION, load_tokenizer, too_large, vocabulary_of, windows
from rewriter.common.cache_names import cache_argument, cache_of
from rewriter.common.errors import RewriterError
from rewriter.common.text_settings import check_tokens, top_setting
from rewriter.ir import Program
from rewriter.ir.absolute_positions import most_tokens
from rewriter.ir.live_model import load_host

WINDOW = 256
Report = Callable[[float, float], None]


@dataclass(frozen=True)
class Text:
    """Windows of tokens, int64 [windows, tokens], none of which overlap.

    `calibration`: what rises in loss are measured on, and a mix is chosen by. `held_out`: what the chosen mix is
    measured on at last. `described`: what they are. `own`: the model wrote them itself.
    """

    calibration: torch.Tensor
    held_out: torch.Tensor
    described: str
    own: bool = False


def text_for(
    program: Program, given: str | None, counts: tuple[int, int], seed: int = 0, report: Report = lambda *_: None
) -> Text:
    """Windows to calibrate and to hold out, as many as `counts` says where the text is long enough.

    Of a `given` text; else the model writes one itself, word by word as it predicts them (temperature 1), from `seed`.
    On such a text the expected rise in loss is the divergence from the original, and it is of the kind that the model
    knows. A model that is too large to be run as a whole reads the packaged text. Raises RewriterError for a text that
    gives no three windows.
    """
    length, count = min(WINDOW, most_tokens(program)), sum(counts)
    own = given is None and too_large(program) is None
    what = "text that the model wrote itself" if own else "the packaged text" if given is None else "the given text"
    if own:
        found = _written(program, count, length, seed, report)
    else:
        found = _read(program, CALIBRATION.read_text(encoding="utf-8") if given is None else given, length, what)
    held_out = counts[1] if len(found) >= count else max(1, len(found) * counts[1] // count)
    described = f"{what}, {held_out * found.shape[1]:,} tokens of it held out"
    # what is held out is the end of a text, which is furthest from what was searched with
    return Text(found[:count][:-held_out], found[:count][-held_out:], described, own)


def _read(program: Program, text: str, length: int, what: str) -> torch.Tensor:
    tokenizer = load_tokenizer(program.source.path, program.source.remote_code)
    if tokenizer is None:
        raise RewriterError(
            f"{program.source.path}: it has no tokenizer that could read {what}. Put tokenizer.json into the "
            "directory, or leave out --calibration: the model then writes a text itself"
        )
    tokenizer.model_max_length = 1 << 30
    tokens = tokenizer(text).input_ids
    check_tokens(what, tokens, vocabulary_of(program), tokenizer)
    while length > 16 and len(tokens) < 12 * length:  # a short text in shorter windows
        length //= 2
    full = [window for window in windows(program, torch.tensor(tokens), length) if len(window) == length]
    if len(full) < 3:
        raise RewriterError(
            f"--calibration: {what} gives {len(tokens)} tokens; at least {3 * length} are needed, to measure on and to "
            "hold out. Give a longer one"
        )
    return torch.stack(full)


@torch.no_grad()
def _written(program: Program, count: int, length: int, seed: int, report: Report) -> torch.Tensor:
    """`count` texts of `length` tokens that the model samples, int64 [count, length]: the same for the same seed.

    Each begins with the token that begins a text, or a random one where the model has none.
    """
    model = load_host(str(program.source.path), program.source.remote_code, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    vocabulary, first = vocabulary_of(program), top_setting(program.source.config, "bos_token_id")
    ids = torch.randint(vocabulary, (count, 1), generator=generator)
    if isinstance(first, int) and 0 <= first < vocabulary:
        ids[:] = first
    name, cache = cache_argument(model), None
    for place in range(1, length):
        report(place, length)
        step = model(input_ids=ids[:, -1:], use_cache=True, **{name: cache})
        cache = cache_of(step)
        chances = step.logits[:, -1].float().softmax(-1)[:, :vocabulary]
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], 1)
    load_host.cache_clear()
    return ids
