"""Figures of a prediction, in seconds, bytes and tokens per second. Every number is of one rank of one model replica.

A phase is one forward pass, in which `seconds` = `compute_seconds` + `exposed_seconds` + `host_seconds`: the compute
stream works, waits for communication, or waits for the host to launch its next kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

Lane = Literal["compute", "communication"]
AllReduces = Literal["none", "measured", "extrapolated", "by formula"]


@dataclass(frozen=True)
class Span:
    """A stretch of one stream's time, in seconds from the start of the phase.

    `name` is the module's path in the compute lane, the collective's kind and the module whose result it completes in
    the communication lane ("all-reduce model.layers.0.mlp"). `layer` is the decoder layer, None outside of the layers.
    `stream` numbers the streams of a lane: 0 for compute, the mesh axes' streams for communication. `nbytes` are those
    of the collective (nccl-tests' size; 0 in the compute lane). `exposed`: in the communication lane, whether the
    compute stream stands idle for it during some of the span; in the compute lane, a stretch in which it stands so.
    """

    lane: Lane
    start: float
    end: float
    name: str
    layer: int | None
    exposed: bool = False
    stream: int = 0
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Phase:
    """One forward pass of a rank.

    `seconds`: from the first launch to the end of the last kernel. `compute_seconds`: the compute stream works.
    `communication_seconds`: the sum of the communication spans, hidden ones too. `exposed_seconds`: the compute stream
    stands idle because of communication; `exposed_by_layer` says where (seconds by decoder layer; -1 for what is
    outside of the layers). `host_seconds`: it stands idle because the host has not launched the next kernel.
    `spans`: of all streams, by start; idle stretches of compute for communication are there as exposed compute spans.
    `flops`: of a rank. `weight_bytes`: weights that it reads; `kernels`: kernels that it launches, collectives too.
    `collectives`: how many run. `measured_seconds`: of `compute_seconds`, those of kernels whose time alone was
    measured; the others' are a roofline's.
    """

    seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    exposed_by_layer: Mapping[int, float]
    spans: tuple[Span, ...] = field(repr=False)
    host_seconds: float = 0.0
    flops: float = 0.0
    weight_bytes: int = 0
    kernels: int = 0
    collectives: int = 0
    measured_seconds: float = 0.0


def joined(phases: Sequence[Phase]) -> Phase:
    """Passes one after the other, as one: figures add up."""
    first, *others = phases
    for other in others:
        later = [replace(s, start=s.start + first.seconds, end=s.end + first.seconds) for s in other.spans]
        by_layer = Counter(first.exposed_by_layer) + Counter(other.exposed_by_layer)
        added = {f.name: getattr(first, f.name) + getattr(other, f.name) for f in fields(Phase) if f.name in _ADDED}
        first = replace(first, **added, exposed_by_layer=dict(sorted(by_layer.items())), spans=(*first.spans, *later))
    return first


_ADDED = {field.name for field in fields(Phase)} - {"exposed_by_layer", "spans"}


def generation_seconds(prefill: Phase, decode: Phase, generate: int) -> float:
    """Seconds from the prompt to the last of `generate` tokens: the prefill gives the first one."""
    return prefill.seconds + (generate - 1) * decode.seconds


@dataclass(frozen=True)
class FirstToken:
    """Time to first token: `seconds` of the prefill of `prompt` tokens of each sequence. `fits`: what a rank holds of
    it and the workload's generated tokens is less than the device's memory."""

    prompt: int
    seconds: float
    fits: bool = True


@dataclass(frozen=True)
class ExactChoice:
    """A way to run the model as it is. `tp`: ranks that share heads and channels, in each of `stages` of layers, of
    each of `replicas`.

    `options`: names of `predict.engines`, with the `switches` that the engine has for them; `available`: it has all.
    `rounds`: some sums are of fewer bits. `prefill_seconds`: of the workload's prompts; `decode_seconds`: per token of
    each sequence. `tokens_per_second`: of all sequences, as in `Prediction`. `fits`: in the devices' memory.
    """

    name: str
    tp: int
    stages: int
    replicas: int
    prefill_seconds: float
    decode_seconds: float
    fits: bool
    time_to_first_token: tuple[FirstToken, ...] = ()
    tokens_per_second: float = 0.0
    options: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    available: bool = True
    rounds: bool = False
    notes: tuple[str, ...] = ()

    def generation_seconds(self, generate: int) -> float:
        """Seconds from the prompt to the last of `generate` tokens."""
        return self.prefill_seconds + (generate - 1) * self.decode_seconds


@dataclass(frozen=True)
class Prediction:
    """One recipe on one fabric.

    `recipe`: as the user named it. `tp`: ranks that share heads and channels, `sp`: those that share tokens; `nodes`:
    over which they are spread. `batch`: sequences; `prompt` and `generate`: tokens of each. `graphed`: kernels are
    launched as one CUDA graph. `modelled`: the fabric's figures are not measured. `all_reduces`: where their durations
    are from; extrapolated are those of other numbers of ranks. `kernels_of`: the system whose kernels were measured,
    where that is another device.

    `prefill`: the pass over the prompt, which gives the first token; where the recipe rewires the prompt alone, the
    calls for the tokens that it leaves exact and for those that it rewires, added up. `time_to_first_token`: of other
    prompts, predicted for each of `workload.FIRST_TOKEN_PROMPTS`; none of what was measured. `decode`: one step, which
    takes as long at any place: the runtime's cache is allocated, and read, for prompt + generate tokens (less for
    windows).
    `tokens_per_second`: batch · generate / `generation_seconds`, prefill included: all sequences of one replica.
    `decode_speedup`, `prefill_speedup`, `end_to_end`: by how much a decode step, the prefill and a whole generation
    (`tokens_per_second`) are faster than those of what the comparison is over (`RecipeComparison.over`).

    `break_even_seconds`: the time of one all-reduce above which the recipe's decode step beats the first recipe's, all
    all-reduces taking as long as each other; `break_even_prefill_seconds` likewise of the prefill. None where it always
    or never beats it, which `break_even_note` and `break_even_prefill_note` then say ("always", "never", "the same
    program" …). `memory_bytes_per_rank`: weights, cache at full length and activations of the prefill; `fits`: whether
    that is less than the device's memory. `kind`: the recipe's ("exact", "approximating", "timing only", or None for
    an unknown). `notes`: what was estimated, passes that could not do what they are for, …; `details`: what decides
    nothing, such as routine passes that found nothing to change, and where computing times are from.

    `seconds_per_token_interval`, `prefill_interval`, `end_to_end_interval`: (low, high) that hold the truth in 80 of
    100 cases (`predict.uncertainty`); None of what was measured.
    """

    recipe: str
    fabric: str
    modelled: bool
    tp: int
    nodes: int
    batch: int
    prompt: int
    generate: int
    graphed: bool
    prefill: Phase
    decode: Phase
    tokens_per_second: float
    decode_speedup: float
    prefill_speedup: float
    end_to_end: float
    break_even_seconds: float | None
    break_even_note: str | None
    memory_bytes_per_rank: int
    fits: bool
    notes: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    sp: int = 1
    kind: str | None = None
    seconds_per_token_interval: tuple[float, float] | None = None
    prefill_interval: tuple[float, float] | None = None
    end_to_end_interval: tuple[float, float] | None = None
    break_even_prefill_seconds: float | None = None
    break_even_prefill_note: str | None = None
    time_to_first_token: tuple[FirstToken, ...] = ()
    all_reduces: AllReduces = "measured"
    kernels_of: str = ""

    @property
    def seconds_per_token(self) -> float:
        """Time per output token (TPOT): of one decode step. The prefill is the time to the first token."""
        return self.decode.seconds

    @property
    def exposed_communication_seconds_per_token(self) -> float:
        """The part of `seconds_per_token` in which the compute stream stands idle because of communication."""
        return self.decode.exposed_seconds

    @property
    def generation_seconds(self) -> float:
        """Seconds from the prompt to the last token of every sequence: prefill + (generate - 1) · decode."""
        return generation_seconds(self.prefill, self.decode, self.generate)


@dataclass(frozen=True)
class PredictedPoint:
    """One choice of ranks and batch. `tp`: ranks that share heads and channels, `sp`: those that share tokens.
    `seconds_per_token`: of a decode step, as in `Prediction` (the user's latency). `tokens_per_second_per_gpu`: of all
    sequences and whole generations, over the ranks. `fits`: in the device's memory. `front`: no other point that fits
    is both faster for the user and better used."""

    tp: int
    batch: int
    seconds_per_token: float
    tokens_per_second_per_gpu: float
    fits: bool
    front: bool = False
    sp: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.sp


@dataclass(frozen=True)
class SkippedRecipe:
    """A recipe that was not predicted, and the reason."""

    recipe: str
    reason: str


@dataclass(frozen=True)
class RecipeComparison:
    """Recipes on one fabric, in the order in which they were named; the first is what the others are compared with.

    `model`: path or model type. `fabric`, `fabric_summary`: its name and a sentence on it; `device`: its GPU.
    `pareto`: points by recipe name, empty where not asked for. `what_if`: changes to the delays, as the user wrote
    them. `skipped`: recipes that cannot run here. `seconds`: CPU seconds that the prediction took. `exact`: what
    users can have without changing the model, where asked for, on `engine`. `over`, `over_decode`, `over_prefill`: what
    `end_to_end`, `decode_speedup` and `prefill_speedup` are over: the exact choice that is fastest in it, or else the
    first recipe. `bound`: the model without communication. `link`: what joins the fabric's GPUs, and its `bandwidth`
    in bytes per second; `parameters`: of the model.
    """

    model: str
    fabric: str
    fabric_summary: str
    device: str
    modelled: bool
    predictions: tuple[Prediction, ...]
    pareto: Mapping[str, tuple[PredictedPoint, ...]]
    what_if: tuple[str, ...] = ()
    skipped: tuple[SkippedRecipe, ...] = ()
    seconds: float = 0.0
    exact: tuple[ExactChoice, ...] = ()
    engine: str = ""
    over: str = ""
    over_decode: str = ""
    over_prefill: str = ""
    bound: Prediction | None = None
    link: str = ""
    bandwidth: float = 0.0
    parameters: int = 0
