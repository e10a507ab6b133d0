"""Text that the original model writes itself: training data without a data set (LLM-QAT, arXiv 2305.17888).

Many streams are decoded in step on transformers' model, with a cache that does not move and products in bf16.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from rewriter.adapt.models import frozen, load_model
from rewriter.adapt.schedule import WIDE_ENOUGH, multiplies_bf16
from rewriter.check.drift import load_tokenizer
from rewriter.common.cache_names import cache_argument, cache_of
from rewriter.common.errors import RewriterError
from rewriter.common.files import replace_text
from rewriter.common.run_context import RunContext
from rewriter.common.text_settings import check_tokens, context_length
from rewriter.emit.files.output_directory import sha256_of
from rewriter.passes.placement.rank_memory import cache_elements
from rewriter.tracing import trace
from rewriter.weights import Checkpoint

ROW = 512  # tokens that the model writes in one stream, at most
STREAMS = 32  # of a part of the cache
QUESTION = 0.25  # of a stream: the longest turn of a user
_HELD_OUT = 1 << 31  # the first seed of text to measure on; of a seed, 32 bits count
_MOST_PARTS = 32  # written together
_FORMAT = 2  # of the cache: counts up where the same source would give another text
_MARKS = ("FIRSTQUESTION", "FIRSTANSWER", "NEXTQUESTION")


def cache_directory() -> Path:
    """The cache of texts that models wrote: `rewriter/self-written` below XDG_CACHE_HOME, or below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rewriter" / "self-written"


@dataclass(frozen=True)
class Turns:
    """Tokens that a stream is given, not drawn: at its start, after a question, after an answer."""

    start: list[int]
    answer: list[int]
    question: list[int]


def self_written(
    source: Path,
    tokens: int,
    device: torch.device,
    context: RunContext,
    held_out: bool = False,
    files: Mapping[str, str] | None = None,
) -> Path:
    """A file of one {"text": …} per line that the model in `source` wrote, of about `tokens` tokens.

    Temperature 1. A model with a chat template writes conversations in half of its streams, both roles; what else is
    written begins with a token at random. Seeds are fixed; what is to be `held_out` has others. Parts of `STREAMS`
    streams are kept in `cache_directory()` by the hashes of weights and config, and are not written again. `files`: the
    sha256 of the weight files of which `source` is made, where it is not the model as it came: with its channels in
    another order it writes the same. Raises RewriterError for a source without a tokenizer.
    """
    tokenizer = load_tokenizer(str(source), context.trust_remote_code)
    if tokenizer is None:
        raise RewriterError(f"{source}: it has no tokenizer, so what the model writes cannot be read. Give --data FILE")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    length = min(context_length(config), ROW)
    hashes = sorted(files.values()) if files else sorted(map(sha256_of, Checkpoint.open(source).files))
    known = json.dumps([_FORMAT, length, hashes, config, tokenizer.chat_template], sort_keys=True)
    place = cache_directory() / hashlib.sha256(known.encode()).hexdigest()[:32]
    name = "held-out" if held_out else "part"
    parts = [place / f"{name}-{n:05}.jsonl" for n in range(-(-tokens // (STREAMS * length)))]
    missing = [number for number, part in enumerate(parts) if not part.is_file()]
    if missing:
        place.mkdir(parents=True, exist_ok=True)
        model = with_bf16_products(frozen(load_model(source, device)))
        at_once = parts_at_once(source, model, length)
        for done in range(0, len(missing), at_once):
            some = missing[done : done + at_once]
            written, total = done * STREAMS * length, len(missing) * STREAMS * length

            def tell(step: int, before: int = written, count: int = len(some), whole: int = total) -> None:
                context.progress("writing text", before + step * STREAMS * count, whole)

            writers = [_Writer(model, tokenizer, length, number + held_out * _HELD_OUT) for number in some]
            for number, texts in zip(some, write_together(model, writers, tell), strict=True):
                replace_text(parts[number], "".join(json.dumps(text) + "\n" for text in texts))
    kept, left = [], tokens
    for line in (line for part in parts for line in part.read_text("utf-8").split("\n")[:-1]):
        if left <= 0:
            break
        example = json.loads(line)
        left -= example.pop("tokens")
        kept.append(json.dumps(example) + "\n")
    joined = place / f"self-{'held-out-' if held_out else ''}{tokens}.jsonl"
    replace_text(joined, "".join(kept))
    return joined


def parts_at_once(source: Path, model: Any, length: int) -> int:
    """The number of parts of the cache that the `model` in `source` writes together: two on a CPU, which writes no
    faster with more; on another device as many as have their keys and values in a quarter of its free memory."""
    parameter = next(model.parameters())
    if parameter.device.type != "cuda":
        return 2
    stream = cache_elements(trace(source), length) * parameter.element_size()
    free, _ = torch.cuda.mem_get_info(parameter.device)
    return max(1, min(_MOST_PARTS, free // 4 // max(1, stream * STREAMS)))


@torch.no_grad()
def write_together(model: Any, writers: list[_Writer], progress: Callable[[int], None]) -> list[list[dict[str, Any]]]:
    """The texts of each writer, each with its number of tokens; `progress` is told the step. All streams go on in step,
    so that nothing is padded."""
    length, name, cache = writers[0].length, cache_argument(model), None
    device = next(model.parameters()).device
    for step in range(length):
        progress(step)
        ids = torch.tensor([writer.token(stream) for writer in writers for stream in range(STREAMS)], device=device)
        if step + 1 < length:
            output = model(input_ids=ids[:, None], use_cache=True, **{name: cache})
            cache = cache_of(output) if step else with_room(cache_of(output), length)
            logits = output.logits[:, -1].float()
            for writer, own in zip(writers, logits.split(STREAMS), strict=True):
                writer.draw(own)
    return [writer.texts() for writer in writers]


class _Writer:
    """Writes one part: `STREAMS` streams of `length` tokens each."""

    def __init__(self, model: Any, tokenizer: Any, length: int, number: int) -> None:
        self.tokenizer, self.length = tokenizer, length
        self.random = torch.Generator().manual_seed(number)
        self.draws = torch.Generator(next(model.parameters()).device).manual_seed(number)
        special = set(tokenizer.all_special_ids)
        rows = model.get_input_embeddings().weight.shape[0]
        size = min(len(tokenizer), rows)
        self.plain = [token for token in range(size) if token not in special]
        self.begin = [i for i in tokenizer("a")["input_ids"][:1] if i in special]  # what begins every text
        stops = getattr(model.generation_config, "eos_token_id", None)
        listed = stops if isinstance(stops, list) else [stops]
        self.ends = {token for token in (*listed, tokenizer.eos_token_id) if token is not None}
        self.chat = chat_turns(tokenizer)
        given = [] if self.chat is None else [*self.chat.start, *self.chat.answer, *self.chat.question]
        check_tokens("what begins texts and turns", [*self.begin, *given], rows, tokenizer)
        if self.chat is not None:
            self.ends |= set(self.chat.answer[:1]) & special
        self.chats = [self.chat is not None and stream % 2 == 0 for stream in range(STREAMS)]
        self.given = [list(self.chat.start) if self.chat and chat else self._opening() for chat in self.chats]
        self.asks, self.since = list(self.chats), [0] * STREAMS
        self.written: list[list[list[int]]] = [[[]] for _ in range(STREAMS)]
        self.drawn = [0] * STREAMS  # after the first step, that of the step before

    def token(self, stream: int) -> int:
        """The next token of a stream: one that is given at the end of a turn or a text, else the one that was drawn."""
        token, chat, asks = self.drawn[stream], self.chats[stream], self.asks[stream]
        over = token in self.ends or (asks and self.since[stream] >= self.length * QUESTION)
        if not self.given[stream] and over:
            if chat and self.chat is not None:
                self.given[stream] = list(self.chat.answer if asks else self.chat.question)
            else:
                self.given[stream] = self._opening()
                self.written[stream].append([])
            self.asks[stream], self.since[stream] = chat and not asks, 0
        if self.given[stream]:
            token = self.given[stream].pop(0)
        else:
            self.since[stream] += 1
        self.written[stream][-1].append(token)
        return token

    def draw(self, logits: torch.Tensor) -> None:
        """Draws the next token of each stream from `logits` [STREAMS, vocabulary], fp32."""
        self.drawn = torch.multinomial(logits.softmax(-1), 1, generator=self.draws)[:, 0].tolist()

    def texts(self) -> list[dict[str, Any]]:
        """The texts that were written, each with its number of tokens."""
        return [self._example(ids) for stream in self.written for ids in stream if len(ids) > 1]

    def _opening(self) -> list[int]:
        chosen = int(torch.randint(len(self.plain), (1,), generator=self.random))
        return [*self.begin, self.plain[chosen]]

    def _example(self, ids: list[int]) -> dict[str, Any]:
        # the tokenizer puts its own token in front again
        held = ids[len(self.begin) :] if ids[: len(self.begin)] == self.begin else ids
        text = self.tokenizer.decode(held, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return {"text": text, "tokens": len(ids)}


def chat_turns(tokenizer: Any) -> Turns | None:
    """The tokens that the chat template writes around questions and answers; None where there is no template, or one
    that does not write messages as they are."""
    if not tokenizer.chat_template:
        return None
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
    try:
        whole = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception:  # templates raise what they like
        return None
    pieces, rest = [], whole
    for mark in _MARKS:
        before, there, rest = rest.partition(mark)
        if not there:
            return None
        pieces.append(before)
    start, answer, question = (tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces)
    return Turns(list(start), list(answer), list(question)) if answer and question else None


# --- quick decoding


class RoomyLayer(DynamicLayer):
    """A layer of a cache with room for `length` tokens from the start. transformers' own is copied at every token."""

    def __init__(self, layer: DynamicLayer, length: int) -> None:
        super().__init__()
        assert layer.keys is not None
        assert layer.values is not None
        self.dtype, self.device, self.is_initialized = layer.keys.dtype, layer.keys.device, True
        self._room = [held.new_empty(*held.shape[:-2], length, held.shape[-1]) for held in (layer.keys, layer.values)]
        for room, held in zip(self._room, (layer.keys, layer.values), strict=True):
            room[..., : held.shape[-2], :] = held
        self._show(layer.keys.shape[-2])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, heads, tokens, size] of all tokens so far."""
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[..., begin:end, :] = new
        return self._show(end)

    def _show(self, end: int) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (room[..., :end, :] for room in self._room)
        return self.keys, self.values


def with_room(cache: Any, length: int) -> Any:
    """A cache of transformers, after the first tokens, with room for `length`. Layers that keep a window or a state
    stay as they are."""
    layers: list[Any] = getattr(cache, "layers", [])
    for index, layer in enumerate(layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            layers[index] = RoomyLayer(layer, length)
    return cache


def with_bf16_products(model: nn.Module) -> nn.Module:
    """`model`, whose linear layers multiply in bf16 where its device has instructions for that: their weights are bf16
    then, all else stays as it is. Autocast would cast every weight at every token."""
    for layer in model.modules():
        if type(layer) is nn.Linear and multiplies_bf16(layer.weight.device) and layer.in_features >= WIDE_ENOUGH:
            layer.weight = nn.Parameter(layer.weight.bfloat16(), requires_grad=False)
            layer.register_forward_pre_hook(lambda layer, inputs: tuple(x.bfloat16() for x in inputs))
            layer.register_forward_hook(lambda layer, inputs, output: output.float())
            if layer.bias is not None:
                layer.bias = nn.Parameter(layer.bias.bfloat16(), requires_grad=False)
    return model
