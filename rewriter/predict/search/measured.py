"""Texts, and rises in loss on them by mixes, measured on the weights, each once: a file keeps them.

Only the layers that a mix changes are computed anew, on the streams that the original has before them; then the rest of
the original on the result.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rewriter.check.drift import WINDOW, DriftSums, load_tokenizer, vocabulary_of, windows
from rewriter.check.sensitivity import between, given_names, with_stream
from rewriter.common.cache_names import cache_argument, cache_of
from rewriter.common.errors import RewriterError
from rewriter.common.files import read_json, replace_text
from rewriter.common.run_context import ProgressCall, silent
from rewriter.common.text_settings import check_tokens, top_setting
from rewriter.ir import Program
from rewriter.ir.absolute_positions import most_tokens
from rewriter.ir.live_model import load_host
from rewriter.ir.marks import marks
from rewriter.ir.phases import REWIRED, prompt_phase
from rewriter.ir.residual import by_layer, residual_blocks, stream_values
from rewriter.ir.simulate import Simulator
from rewriter.passes.phases import both_wirings, single_device
from rewriter.passes.quantize_collectives import always_quantized, is_quantized
from rewriter.predict.search.choices import REWRITES, SCHEDULES, STANDARD, Mix, Part, recipe_of
from rewriter.recipes import Recipe
from rewriter.recipes.apply import apply_recipe
from rewriter.recipes.recipe import MeasuredRise

Windows = list[list[int]]  # of tokens, equally many in each
Effect = tuple[float, float, float]  # on a window, nats per token: KL(original ‖ rewritten), rise in loss, loss before


@dataclass(frozen=True)
class Text:
    """Windows of tokens, none of which overlap: a mix is chosen by `calibration`, and measured on `held_out` at last.
    `described`: what they are. `own`: the model wrote them itself."""

    calibration: Windows
    held_out: Windows
    described: str
    own: bool = False


def text_for(
    program: Program, given: str | None, counts: tuple[int, int], seed: int = 0, progress: ProgressCall = silent
) -> Text:
    """Windows to calibrate and to hold out, as many as `counts` says where the text is long enough.

    Of a `given` text; else the model writes one itself, word by word as it predicts them (temperature 1), from `seed`.
    On such a text the expected rise in loss is the divergence from the original. Raises RewriterError for a text that
    gives no three windows.
    """
    length, count = min(WINDOW, most_tokens(program)), sum(counts)
    found = _written(program, count, length, seed, progress) if given is None else _read(program, given, length)
    held_out = counts[1] if len(found) >= count else max(1, len(found) * counts[1] // count)
    what = "text that the model wrote itself" if given is None else "the given text"
    described = f"{what}, {held_out * len(found[0]):,} tokens of it held out"
    # what is held out is the end of a text, which is furthest from what was searched with
    return Text(found[:count][:-held_out], found[:count][-held_out:], described, given is None)


def _read(program: Program, text: str, length: int) -> Windows:
    tokenizer = load_tokenizer(program.source.path, program.source.remote_code)
    if tokenizer is None:
        raise RewriterError(
            f"{program.source.path}: it has no tokenizer that could read the given text. Put tokenizer.json into the "
            "directory, or leave out --calibration: the model then writes a text itself"
        )
    tokenizer.model_max_length = 1 << 30
    tokens = tokenizer(text).input_ids
    check_tokens("the given text", tokens, vocabulary_of(program), tokenizer)
    while length > 16 and len(tokens) < 12 * length:  # a short text in shorter windows
        length //= 2
    full = [window.tolist() for window in windows(program, torch.tensor(tokens), length) if len(window) == length]
    if len(full) < 3:
        raise RewriterError(
            f"--calibration: the given text gives {len(tokens)} tokens; at least {3 * length} are needed, to measure "
            "on and to hold out. Give a longer one"
        )
    return full


@torch.no_grad()
def _written(program: Program, count: int, length: int, seed: int, progress: ProgressCall) -> Windows:
    """`count` texts of `length` tokens that the model samples: the same for the same seed. Each begins with the token
    that begins a text, or a random one where the model has none."""
    model = load_host(str(program.source.path), program.source.remote_code, torch.float32)
    vocabulary, first = vocabulary_of(program), top_setting(program.source.config, "bos_token_id")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (count, 1), generator=generator)
    if isinstance(first, int) and 0 <= first < vocabulary:
        ids[:] = first
    name, cache = cache_argument(model), None
    for place in range(1, length):
        progress("writing a text", place, length)
        step = model(input_ids=ids[:, -1:], use_cache=True, **{name: cache})
        cache, chances = cache_of(step), step.logits[:, -1].float().softmax(-1)[:, :vocabulary]
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], 1)
    load_host.cache_clear()
    return ids.tolist()


class Store:
    """Values by key, plain data, in `directory`/measured-JOB.json, where JOB is a hash of what they depend on; without
    a directory, in memory. Raises RewriterError where the file cannot be written, or is no JSON."""

    def __init__(self, directory: Path | None, job: Mapping[str, Any]) -> None:
        name = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:16]
        self.path, self.values = directory and directory / f"measured-{name}.json", dict[str, Any]()
        if self.path is not None and self.path.exists():
            self.values = read_json(self.path, "Remove the file; it is measured again")
        try:
            self.put({})
        except OSError as error:
            why = error.strerror or error
            raise RewriterError(f"--state {directory}: {why}. Name a directory that can be written") from None

    def put(self, values: Mapping[str, Any]) -> None:
        """Keep values. A search that is cut off meanwhile leaves the file as it was before."""
        self.values |= values
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self.path, json.dumps(self.values, allow_nan=False))


def effect(ids: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> Effect:
    """Effect on tokens, int64 [T], with the logits [T, vocabulary] before and after."""
    sums = DriftSums()
    sums.add(ids, before, after)
    return sums.kl, (sums.after - sums.before) / sums.predicted, sums.before / sums.predicted


def rise_of(effects: Sequence[Effect], loss: float, own: bool = False) -> MeasuredRise:
    """Means over windows, as shares of the original's `loss` (nats per token), with their standard error (of one
    window, as large as the rise). `own`: the original wrote them itself, so that the rise is expected to be the KL."""
    kls, rises, _ = zip(*effects, strict=True)
    each, kl, seen = kls if own else rises, statistics.fmean(kls), statistics.fmean(rises) / loss
    error = statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else abs(each[0])
    found = dict(loss=loss, rise=kl / loss if own else seen, error=error / loss, kl=kl, seen=seen)
    return MeasuredRise(**{name: round(value, 7) for name, value in found.items()})


@dataclass
class Measurements:
    """Measurements of one traced model on `ranks` ranks and one text, with its full `weights` in fp32 by runtime name.
    Those in the `store` are not made again. `refused`: by rewrite that applies to no layer, or not to all, why not.
    What the original computes in a window is kept in memory. Raises RewriterError for a model whose layers are no
    blocks of one residual stream."""

    original: Program
    ranks: int
    weights: Mapping[str, torch.Tensor]
    text: Text
    store: Store
    refused: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        blocks, layers = by_layer(residual_blocks(self.original)), range(self.original.source.num_layers)
        if sorted(blocks) != list(layers):
            raise RewriterError(
                f"model type {self.original.source.model_type!r}: its layers are no blocks of one residual stream, so "
                "no rewrite of single layers applies. `rewrite inspect` says what does"
            )
        # numbers of the stream values that layers begin with, and of the last one
        self.starts = [*(blocks[layer][0].index for layer in layers), blocks[layers[-1]][-1].index + 1]
        self._whole = with_stream(self.original, range(self.starts[-1] + 1))
        self._windows: dict[tuple[int, ...], Any] = {}

    def alone(self, progress: ProgressCall = silent) -> dict[Part, float]:
        """KL(original ‖ rewritten) of every rewrite in every layer that it applies to, alone, on the first window of
        the calibration text: nats per token, above 0. For the prompt alone, not in the last layer, most of which is
        left out for tokens of a prompt anyway."""
        costs: dict[Part, float] = {}
        for done, (name, rewrite) in enumerate(REWRITES.items()):
            progress("measuring each rewrite alone", done, len(REWRITES))
            for start in range(len(self.starts) - rewrite.layers - rewrite.prompt):
                try:
                    ((kl, *_),) = self._kept("alone", Mix((Part(start, name),)), self.text.calibration[:1])
                    costs[Part(start, name)] = max(kl, 1e-7)
                except RewriterError as error:
                    self.refused.setdefault(name, str(error))
        return costs

    def rise(self, mix: Mix = Mix(), held_out: bool = False) -> MeasuredRise:
        """Rise in loss on the calibration text, or on held-out text. Ranks that share tokens compute what others do."""
        windows, what = (self.text.held_out, "held out") if held_out else (self.text.calibration, "mix")
        loss = statistics.fmean(loss for *_, loss in self._kept(what, Mix(), windows))
        return rise_of(self._kept(what, replace(mix, base=STANDARD), windows), loss, self.text.own)

    def _kept(self, what: str, mix: Mix, windows: Windows) -> list[Effect]:
        if (key := f"{what} {mix.key}") not in self.store.values:
            self.store.put({key: self.effects(mix, windows)})
        return [(kl, rise, loss) for kl, rise, loss in self.store.values[key]]

    @torch.no_grad()
    def effects(self, mix: Mix, windows: Windows) -> list[Effect]:
        """Effect of a mix in each window; of one that rewires the prompt alone, of the first half on the rest. Raises
        RewriterError as passes do."""
        first = min((part.start for part in mix.parts), default=0)
        after_last = max((part.layers.stop for part in mix.parts), default=1)
        program, (start, end) = self.applied(recipe_of(mix)), (self.starts[first], self.starts[after_last])
        written = [n for n, value in enumerate(stream_values(program.graph)) if marks(value).layer == after_last - 1]
        part, rest = between(program, range(start + 1), written[-1]), between(self.original, [end])
        names, (left,) = given_names(range(start + 1)), given_names([end])
        found = []
        for ids in torch.tensor(windows):
            logits, *streams = self.of_original(ids)
            mask, since = prompt_of(program, len(ids))
            x = Simulator(part, self.weights).run(ids[None], given=dict(zip(names, streams, strict=False)) | mask)[0]
            rewritten = Simulator(rest, self.weights).run(ids[None], given={left: x})[0]
            found.append(effect(ids[since:], logits[0, since:], rewritten[0, since:]))
        return found

    def applied(self, recipe: Recipe) -> Program:
        """The original rewritten, in the wirings of both phases: with every message quantized, however short, where the
        recipe has formats; else on one device. Raises RewriterError as passes do."""
        program = apply_recipe(self.original, recipe, self.ranks, SCHEDULES)[0]
        return always_quantized(both_wirings(program)) if is_quantized(program) else single_device(program)

    @torch.no_grad()
    def of_original(self, ids: torch.Tensor) -> Any:
        """The original's logits [1, T, vocabulary] and stream values [1, T, D] in a window, int64 [T]."""
        key = tuple(ids.tolist())
        if key not in self._windows:
            self._windows[key] = Simulator(self._whole, self.weights).run(ids[None])[0]
        return self._windows[key]


def prompt_of(program: Program, tokens: int) -> tuple[dict[str, torch.Tensor], int]:
    """(the input that says which tokens of a window are rewired, or none; the first token that is measured). Where the
    prompt alone is rewired, that is the first half of the window, and the rest is measured."""
    phase, prompt = prompt_phase(program), tokens // 2
    return ({}, 0) if phase is None else ({REWIRED: phase.rewired(tokens, prompt=prompt)}, prompt - 1)
