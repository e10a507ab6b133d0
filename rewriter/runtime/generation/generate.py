"""Text generation by any emitted module: prefill, then one token at a time from the cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rewriter.common.errors import RewriterError
from rewriter.common.text_settings import check_positions, check_tokens
from rewriter.ir.phases import PromptPhase
from rewriter.runtime.context import Context, positions
from rewriter.runtime.generation.decode_step import PREFILL_CHUNK, DecodeState, DecodeStep, Sampling, decode_step
from rewriter.runtime.replicas import Replicas
from rewriter.runtime.streams import host_waits


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor | None]:
    """ids int64 [B, S], padded at the left, and the padding per row int64 [B], None if all rows have one length."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), pad_id, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
    padding = [longest - len(prompt) for prompt in prompts]
    return ids, torch.tensor(padding) if any(padding) else None


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    eos_token_ids: Collection[int] = (),
    pad_token_id: int = 0,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    use_cache: bool = True,
    prefill_chunk: int | None = PREFILL_CHUNK,
    group: ProcessGroup | None = None,
    on_token: Callable[[int, int], bool] | None = None,
) -> list[list[int]]:
    """The new tokens of each prompt, up to and including its end-of-sequence token.

    Greedy at temperature 0, which equals transformers' `generate(do_sample=False)`; else drawn: see `Sampling`. Every
    rank of `group` (default: those of this rank's replica of the model) calls this with the same arguments; the first
    rank's choice is sent to the others, so that ranks cannot part ways over rounding. Prompts are computed
    `prefill_chunk` tokens at a time, which bounds the memory that they take. The cache and what is compiled for it stay
    with the model for its next generation. `use_cache=False` recomputes everything for each token.

    On the first rank, `on_token(prompt, token)` is called with every token as soon as it is chosen, `prompt` being an
    index into `prompts`. Where it returns True, that prompt ends with this token, on all ranks.

    Raises RewriterError for a prompt without tokens or with tokens beyond the vocabulary, more tokens than the model's
    table of positions has room for, an argument outside of its range, and logits that are no numbers.
    """
    if not prompts or not all(prompts):
        raise RewriterError("generate: a prompt has no tokens. Give each at least one")
    for name, value in (("max_new_tokens", max_new_tokens), ("prefill_chunk", prefill_chunk)):
        if value is not None and value < 1:
            raise RewriterError(f"generate: {name} is {value}, expected at least 1")
    vocabulary: int | None = getattr(model, "vocabulary", None)
    for row, prompt in enumerate(prompts):
        check_tokens(f"generate: prompt {row}", prompt, vocabulary)
    check_tokens("generate: pad_token_id", [pad_token_id], vocabulary)
    if not all(isinstance(end, int) for end in eos_token_ids):
        raise RewriterError(
            f"generate: eos_token_ids is {list(eos_token_ids)}, expected numbers of tokens. Leave it out without any"
        )
    check_positions(max(map(len, prompts)), max_new_tokens, getattr(model, "positions", None))
    sampling = Sampling(temperature, top_k, top_p)
    if group is None and dist.is_initialized():
        replicas: Replicas | None = getattr(model, "replicas", None)
        group = dist.group.WORLD if replicas is None or replicas.data_parallel == 1 else replicas.own
    device = next(model.parameters()).device
    ids, first_valid = left_pad(prompts, pad_token_id)
    ids, first_valid = ids.to(device), None if first_valid is None else first_valid.to(device)
    length = ids.shape[1]
    state: DecodeStep | _WithoutCache
    if use_cache:
        state = decode_step(model, len(prompts), length + max_new_tokens, group)
    else:
        state = _WithoutCache(model, len(prompts), max_new_tokens, device, group)
    state.begin(length, first_valid, sampling, seed, eos_token_ids, pad_token_id)
    state.prefill(ids, prefill_chunk)

    # From here on the host reads nothing of a token's: on a GPU it would wait for each, and the GPU then for it.
    listens = on_token is not None and (group is None or group.rank() == 0)
    poll = 1 if on_token is not None else tokens_between_polls(device)
    ended = _Poll()
    for count in range(1, max_new_tokens + 1):
        if on_token is not None and listens:
            state.stopped.copy_(_stopped(on_token, state))
        state.take()
        can_end = len(eos_token_ids) > 0 or on_token is not None
        if count == max_new_tokens or (can_end and count % poll == 0 and ended.ask(state.finished)):
            break
        state.next()
    return _tokens(state)


class _WithoutCache(DecodeState):
    """Everything is computed for every token."""

    def __init__(
        self, model: nn.Module, batch: int, capacity: int, device: torch.device, group: ProcessGroup | None
    ) -> None:
        super().__init__(batch, capacity, device, group)
        self.model = model

    def prefill(self, ids_BS: Tensor, chunk: int | None = None) -> None:
        self.ids, self.prompt = ids_BS, ids_BS.shape[1]
        self._compute()

    def next(self) -> None:
        self.ids = torch.cat([self.ids, self.token], dim=1)
        self._compute()

    def _compute(self) -> None:
        first_valid = self.first_valid if self.padded else None
        length, device = self.ids.shape[1], self.ids.device
        here = positions(length, first_valid, self.batch, device)
        phase: PromptPhase | None = getattr(self.model, "phase", None)
        rewired = None if phase is None else phase.rewired(length, first_valid, self.prompt).to(device)
        ctx = Context(first_valid=first_valid, rewired=rewired)
        self.choose(self.model(self.ids, here, ctx, logits_to_keep=1)[:, -1])


def tokens_between_polls(device: torch.device) -> int:
    """Number of tokens after which the host asks whether all prompts have ended: the same on all ranks, which stop
    together. What is made beyond the ends is left out. On a CPU to ask costs nothing."""
    return 1 if device.type == "cpu" else 16


class _Poll:
    """True if all prompts have ended. On a GPU the answer is that of the poll before, which the host need not wait
    for; not that of whichever poll has arrived, so that all ranks get the same."""

    def __init__(self) -> None:
        self.last: tuple[Tensor, torch.cuda.Event] | None = None

    def ask(self, finished: Tensor) -> bool:
        if not host_waits(finished):
            return bool(finished.all())
        before, answer = self.last, torch.empty((), dtype=torch.bool, pin_memory=True)
        answer.copy_(finished.all(), non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self.last = answer, arrived
        if before is None:
            return False
        before[1].synchronize()
        return bool(before[0])


def _stopped(on_token: Callable[[int, int], bool], state: DecodeState) -> Tensor:
    """bool [B]: what `on_token` says of the prompts that are not finished, each with its next token."""
    rows = zip(state.choice.tolist(), state.finished.tolist(), strict=True)
    return torch.tensor([not done and bool(on_token(row, token)) for row, (token, done) in enumerate(rows)])


def _tokens(state: DecodeState) -> list[list[int]]:
    """The produced tokens. Raises RewriterError where logits were no numbers."""
    broken = [row for row, is_broken in enumerate(state.broken.tolist()) if is_broken]
    if broken:
        raise RewriterError(
            f"generate: logits of prompt {broken[0]} are NaN or infinite. Check the weights, or load the model in a "
            "wider dtype, such as fp32"
        )
    rows, lengths = state.produced.T.tolist(), state.lengths.tolist()
    return [row[:count] for row, count in zip(rows, lengths, strict=True)]
