"""Recipes compared on a fabric, without a GPU: each program's passes on a roofline, simulated event by event."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from rewriter.common.errors import RewriterError
from rewriter.common.text_settings import quantization_settings
from rewriter.fabric import Call, Delay, Fabric, WhatIf, load_fabric
from rewriter.fabric.alpha_beta import BY_FORMULA
from rewriter.ir import Program, args_of
from rewriter.ir.communication import model_dtype, model_dtype_bytes
from rewriter.ir.marks import marks
from rewriter.ir.phases import PromptPhase, is_phased, prompt_phase
from rewriter.passes.base import Effect
from rewriter.passes.phases import without_prompt_passes
from rewriter.passes.placement.rank_memory import cache_elements, memory
from rewriter.passes.sequence.sequence_plans import attentions
from rewriter.predict import uncertainty
from rewriter.predict.break_even import BreakEven
from rewriter.predict.forward import Runner
from rewriter.predict.kernel_time import rates_of
from rewriter.predict.results import (
    AllReduces,
    FirstToken,
    Phase,
    PredictedPoint,
    Prediction,
    RecipeComparison,
    SkippedRecipe,
    generation_seconds,
    joined,
)
from rewriter.predict.steps import Begin, Place, Step, TimelineRun, sequence_parallel, steps
from rewriter.predict.timeline import SET_ASIDE, KernelDurations, Timeline
from rewriter.predict.uncertainty import borrowed_from, interval
from rewriter.predict.weight_formats import parameters_of_format, stored_weights
from rewriter.predict.workload import FIRST_TOKEN_PROMPTS, Cluster, ForwardPass, StoredWeights, WeightFormat, Workload

_KEPT = 8  # wirings of exact tokens that are kept
PHASED = (
    "It rewires {}. A prefill is a call for these tokens, whose last layer computes keys and values alone, and one for "
    "the exact tokens at each end; generated tokens are computed as without these passes."
)


@dataclass(frozen=True)
class Candidate:
    """A recipe's name and the program that it makes; `notes` and `details` say what its passes did not do."""

    recipe: str
    program: Program
    notes: tuple[str, ...] = ()
    details: tuple[str, ...] = ()

    @property
    def kind(self) -> Effect:
        """The weakest effect of its passes."""
        effects = {entry.kind for entry in self.program.history if entry.fired}
        return "timing only" if "timing only" in effects else "approximating" if "approximating" in effects else "exact"


Calls = list[list[Step]]
"""The steps of each call of a pass, one after the other."""


@dataclass(frozen=True)
class _Simulated:
    prefill: Phase
    decode: Phase
    steps: tuple[Calls, Calls]
    notes: tuple[str, ...]
    changed: tuple[tuple[float, float], ...] = ()  # seconds of both, with each uncertain term off

    @property
    def seconds(self) -> list[tuple[float, float]]:
        """Seconds of both passes, as they are and with each uncertain term off."""
        return [(self.prefill.seconds, self.decode.seconds), *self.changed]


@dataclass
class Predictor:
    """Predicts programs on one fabric, whose ranks are spread evenly over the workload's nodes. It keeps what modules
    cost, which programs of one model share."""

    workload: Workload
    cluster: Cluster
    runner: Runner = field(default_factory=Runner)
    durations: dict[object, KernelDurations] = field(default_factory=dict)
    known: dict[Call, Delay] = field(default_factory=dict)
    wirings: dict[Hashable, Program] = field(default_factory=dict)  # of exact tokens; each holds its origin
    changes: dict[int, list[tuple[KernelDurations, bool]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = self.cluster.fabric
        self.fabric = named if isinstance(named, Fabric) else load_fabric(named)
        model = self.fabric.delay_model(self.cluster.library, graphed=self.workload.graphed)
        self.model = WhatIf.parse(model, self.cluster.what_if)

    def compare(
        self, model: str, candidates: Sequence[Candidate], skipped: Sequence[SkippedRecipe] = ()
    ) -> RecipeComparison:
        """All candidates, the first being what the others are compared with.

        Raises RewriterError where the first cannot be simulated; others that cannot are in the result's `skipped`.
        """
        predictions: list[Prediction] = []
        lacking: list[SkippedRecipe] = []
        first: tuple[_Simulated, list[BreakEven]] | None = None
        for candidate in candidates:
            try:
                done = self._with_changes(candidate.program, self.simulate(candidate.program))
            except RewriterError as error:  # the fabric has no answer for what it communicates
                if first is None:
                    raise
                lacking.append(SkippedRecipe(candidate.recipe, str(error)))
                continue
            predictions.append(self._prediction(candidate, done, first))
            if first is None:
                durations = self._durations(candidate.program).without_skew()
                first = done, [BreakEven(made, durations, self._delay) for made in done.steps]
        return RecipeComparison(
            model=model,
            fabric=self.fabric.name,
            fabric_summary=self.fabric.summary,
            device=self.fabric.device.name,
            modelled=self.fabric.modelled,
            predictions=tuple(predictions),
            pareto={},
            what_if=self.cluster.what_if,
            over=predictions[0].recipe,
            over_decode=predictions[0].recipe,
            over_prefill=predictions[0].recipe,
            link=self.fabric.link,
            bandwidth=self.fabric.narrowest,
            parameters=sum(math.prod(p.full_shape or p.shape) for p in candidates[0].program.parameters.values()),
            skipped=(*skipped, *lacking),
        )

    def simulate(
        self, program: Program, batch: int | None = None, record: bool = True, cut: PromptPhase | None = None
    ) -> _Simulated:
        """The passes of a program. `cut`: its prefill is cut into calls as that of a program which rewires these tokens
        alone, by default those of its own passes."""
        load, batch, cut = self.workload, batch or self.workload.batch, cut or prompt_phase(program)
        exact = self._exact(program)
        prefill, said = self._calls(program, self._prefill(program, batch, load.prompt, cut))
        last = replace(self._pass(program, batch, 1, load.prompt), keys=load.prompt + load.generate)
        decode, more = self._calls(program, [(exact, last)])
        first, later = (self._phase(program, calls, record) for calls in (prefill, decode))
        return _Simulated(first, later, (prefill, decode), tuple(dict.fromkeys(said + more)))

    def first_token(self, program: Program, prompt: int, cut: PromptPhase | None = None) -> FirstToken:
        """The prefill of another prompt, everything else being the workload's. `cut`: as in `simulate`."""
        load, cut = self.workload, cut or prompt_phase(program)
        calls, _ = self._calls(program, self._prefill(program, load.batch, prompt, cut))
        seconds = self._phase(program, calls, record=False).seconds
        return FirstToken(prompt, seconds, self.fits(program, load.batch, prompt))

    def _prefill(
        self, program: Program, batch: int, prompt: int, cut: PromptPhase | None
    ) -> list[tuple[Program, ForwardPass]]:
        """The calls that a prefill consists of. Of one that is cut: the exact tokens before the rewired ones, these,
        and the exact ones after them, each over the cache of those before; the last call alone has logits."""
        load, exact = self.workload, self._exact(program)
        parts = [(program, prompt)]
        if cut is not None:
            head, tail = min(cut.exact_head, prompt), min(cut.exact_tail, prompt)
            body = prompt - head - tail
            parts = [(exact, head), (program, body), (exact, tail)] if body > 0 else [(exact, prompt)]
        keys = prompt + load.generate
        whole = replace(self._pass(program, batch, prompt, prompt), logits=0 if load.all_logits else 1)
        calls: list[tuple[Program, ForwardPass]] = []
        before = 0
        for wiring, tokens in parts:
            if tokens:
                calls.append((wiring, replace(whole, tokens=tokens, keys=keys if calls else 0, before=before)))
                before += tokens
        cache_only = not load.all_logits
        return [*((wiring, replace(one, cache_only=cache_only)) for wiring, one in calls[:-1]), calls[-1]]

    def _pass(self, program: Program, batch: int, tokens: int, prompt: int) -> ForwardPass:
        """`tokens` of a generation that begins with `prompt`."""
        load = self.workload
        plain = prompt + load.generate if load.attention == "plain" else 0
        return ForwardPass(
            batch,
            tokens,
            fused=load.fused,
            plain=plain,
            weights=self._stored(program),
            small_cache=load.cache is not None,
        )

    def _stored(self, program: Program) -> StoredWeights | None:
        return stored_weights(self.workload.weights, quantization_settings(program.source.config))

    def _exact(self, program: Program) -> Program:
        """The wiring of exact tokens; programs whose passes differ in those of the prompt alone have it in common."""
        if prompt_phase(program) is None:
            return program
        passes = tuple(repr(entry.rewrite) for entry in program.history if not is_phased(entry.rewrite))
        key = (id(program.origin), tuple(program.mesh.items()), passes)
        if key not in self.wirings:
            if len(self.wirings) >= _KEPT:
                self.wirings.clear()
            self.wirings[key] = without_prompt_passes(program)
        return self.wirings[key]

    def _calls(self, program: Program, given: Sequence[tuple[Program, ForwardPass]]) -> tuple[Calls, tuple[str, ...]]:
        """The steps of these calls of wirings of `program`, and notes on them."""
        place, fuse = self._place(program), self.workload.fused
        forwards = [self.runner.run(wiring, one) for wiring, one in given]
        listed = [steps(made, place, fuse) for made in forwards]
        if self.workload.sequence_parallel and not given[0][1].is_decode:
            listed = [sequence_parallel(one) for one in listed]
        return listed, tuple(note for made in forwards for note in made.notes)

    def _phase(self, program: Program, calls: Calls, record: bool) -> Phase:
        return joined([self._timeline(program, record).phase(listed) for listed in calls])

    def _timeline(self, program: Program, record: bool) -> Timeline:
        durations = self._durations(program)
        cached = self.fabric.device.l2_bytes * SET_ASIDE if self.workload.l2_prefetch else 0.0
        return Timeline(durations, self._delay, record, prefetch=cached / durations.rates.bandwidth)

    def seconds_of(self, program: Program, given: ForwardPass) -> float:
        """Seconds of any forward pass of a program, its workload's formats of weights and cache aside."""
        made = replace(
            given, fused=self.workload.fused, weights=self._stored(program), small_cache=self.workload.cache is not None
        )
        calls, _ = self._calls(program, [(program, made)])
        return self._phase(program, calls, record=False).seconds

    def outside_of_layers(self, program: Program) -> tuple[float, float]:
        """Seconds of a decode step's kernels outside of the layers, and inside."""
        done, durations = self.simulate(program, record=False), self._durations(program)
        runs = [step for listed in done.steps[1] for step in listed if isinstance(step, TimelineRun)]
        outside = sum(durations.of(run.kernels)[0] for run in runs if run.layer is None)
        return outside, done.decode.seconds - outside

    def _with_changes(self, program: Program, done: _Simulated) -> _Simulated:
        """`done`, simulated again with each term that is uncertain changed."""
        usual = self._durations(program)
        if id(usual) not in self.changes:
            made = [step for listed in done.steps[1] for step in listed if isinstance(step, TimelineRun)]
            ran = [kernel for step in made for kernel in step.kernels]
            listed = uncertainty.changes(usual.rates, ran, self.fabric.modelled)
            self.changes[id(usual)] = [(KernelDurations(rates), more) for rates, more in listed]
        seconds: list[tuple[float, float]] = []
        for durations, slower in self.changes[id(usual)]:

            def delays(begin: Begin, call: Call, more: bool = slower) -> Delay:
                delay = self._delay(begin, call)
                return uncertainty.longer(delay, self.fabric.modelled) if more else delay

            first, later = (
                sum(Timeline(durations, delays, record=False).run(listed) for listed in calls) for calls in done.steps
            )
            seconds.append((first, later))
        if self.workload.served:
            times = math.exp(uncertainty.SERVER)
            seconds.append((done.prefill.seconds * times, done.decode.seconds * times))
        return replace(done, changed=tuple(seconds))

    def point(self, program: Program, batch: int) -> PredictedPoint:
        """One choice of ranks (the program's) and batch."""
        load, ranks = self.workload, math.prod(program.mesh.values())
        done = self.simulate(program, batch, record=False)
        seconds = generation_seconds(done.prefill, done.decode, load.generate)
        return PredictedPoint(
            tp=program.mesh.get("tp", 1),
            sp=program.mesh.get("sp", 1),
            batch=batch,
            seconds_per_token=done.decode.seconds,
            tokens_per_second_per_gpu=batch * load.generate / seconds / ranks,
            fits=self.fits(program, batch),
        )

    # --- one recipe ---

    def _prediction(
        self, candidate: Candidate, done: _Simulated, first: tuple[_Simulated, list[BreakEven]] | None
    ) -> Prediction:
        load, program = self.workload, candidate.program
        even: list[tuple[float | None, str | None]] = [(None, "the first recipe")] * 2
        if first is not None:
            even = [known.of(made) for known, made in zip(first[1], done.steps, strict=True)]
        compared = done if first is None else first[0]
        # a generation's seconds, as it is and with each term off, which is off for both recipes
        theirs, ours = (
            [prefill + (load.generate - 1) * decode for prefill, decode in one.seconds] for one in (compared, done)
        )
        end_to_end, *changed = (a / b for a, b in zip(theirs, ours, strict=True))
        return Prediction(
            recipe=candidate.recipe,
            fabric=self.fabric.name,
            modelled=self.fabric.modelled,
            all_reduces=self._source_of_sums(done),
            kernels_of=borrowed_from(self._durations(program).rates),
            tp=program.mesh.get("tp", 1),
            sp=program.mesh.get("sp", 1),
            nodes=self._nodes(program),
            batch=load.batch,
            prompt=load.prompt,
            generate=load.generate,
            graphed=load.graphed,
            prefill=done.prefill,
            decode=done.decode,
            tokens_per_second=load.batch * load.generate / ours[0],
            decode_speedup=compared.decode.seconds / done.decode.seconds,
            prefill_speedup=compared.prefill.seconds / done.prefill.seconds,
            end_to_end=end_to_end,
            break_even_prefill_seconds=even[0][0],
            break_even_prefill_note=even[0][1],
            break_even_seconds=even[1][0],
            break_even_note=even[1][1],
            memory_bytes_per_rank=self.held(program, load.batch),
            fits=self.fits(program, load.batch),
            notes=(*candidate.notes, *done.notes, *self._said(program, done)),
            details=(*candidate.details, self._computed(program, done)),
            kind=candidate.kind,
            seconds_per_token_interval=interval(done.decode.seconds, [decode for _, decode in done.changed]),
            prefill_interval=interval(done.prefill.seconds, [prefill for prefill, _ in done.changed]),
            end_to_end_interval=interval(end_to_end, changed),
            time_to_first_token=tuple(self.first_token(program, prompt) for prompt in FIRST_TOKEN_PROMPTS),
        )

    def _said(self, program: Program, done: _Simulated) -> tuple[str, ...]:
        """Notes on the tokens that it rewires, and on where the times of its collectives are from."""
        notes = self._estimated(done)
        phase = prompt_phase(program)
        return (*([] if phase is None else [PHASED.format(phase)]), *notes)

    def _computed(self, program: Program, done: _Simulated) -> str:
        """A note on where the times of its kernels are from."""
        whole, known = done.decode.compute_seconds, done.decode.measured_seconds
        table = self._durations(program).rates.table
        if table is None:
            return "Computing: by roofline, since no kernels were measured on such a device, or none of this dtype."
        share = min(1.0, known / whole) if whole else 0.0
        return f"Computing: kernels as measured on {table.name}, {share:.0%} of a decode step; else by roofline."

    def _estimated(self, done: _Simulated) -> tuple[str, ...]:
        """The origin of the durations of collectives that nobody measured among such ranks."""
        return tuple(dict.fromkeys(note for call in _communicated(done) if (note := self.known[call].note)))

    def _source_of_sums(self, done: _Simulated) -> AllReduces:
        sums = [self.known[call].note for call in _communicated(done) if call.kind == "all_reduce"]
        if not sums:
            return "none"
        if self.fabric.modelled or any(BY_FORMULA in note for note in sums):
            return "by formula"
        return "extrapolated" if any(sums) else "measured"

    def held(self, program: Program, batch: int, prompt: int | None = None, stages: int = 1) -> int:
        """See `bytes_per_rank`; of a whole generation of `batch` sequences, whose prompts have the workload's size or
        `prompt` tokens."""
        load = self.workload
        return bytes_per_rank(
            program, batch, prompt or load.prompt, load.generate, plain=load.attention == "plain",
            all_logits=load.all_logits, weights=load.weights, cache=load.cache, stages=stages,
        )  # fmt: skip

    def fits(self, program: Program, batch: int, prompt: int | None = None, stages: int = 1) -> bool:
        return self.held(program, batch, prompt, stages) <= self.fabric.device.memory

    # --- the fabric ---

    def _durations(self, program: Program) -> KernelDurations:
        dtype = str(model_dtype(program)).removeprefix("torch.")
        if dtype not in self.durations:
            overlap = self.model.overlap(self.fabric.overlap)
            rates = rates_of(self.fabric.device, dtype, self.workload.graphed, overlap)
            table = rates.table if self.model.measured_kernels else None
            self.durations[dtype] = KernelDurations(replace(rates, table=table, factor=self.model.kernels))
        return self.durations[dtype]

    def _delay(self, begin: Begin, call: Call) -> Delay:
        if call not in self.known:
            delay = self.model.delay(call)
            if not 0.0 <= delay.seconds < math.inf or not 0.0 <= delay.transfer < math.inf:
                raise RewriterError(
                    f"{self.fabric.name}: {call.kind} of {call.nbytes} bytes among {call.size} ranks takes "
                    f"{delay.seconds:g} s, of which {delay.transfer:g} s are its transfer; expected finite durations, "
                    "0 or more. Correct the fabric's model, or --what-if"
                )
            self.known[call] = delay
        return self.known[call]

    def _nodes(self, program: Program) -> int:
        return self.workload.nodes or self._fewest(math.prod(program.mesh.values()))

    def _fewest(self, ranks: int) -> int:
        return next(n for n in range(-(-ranks // self.fabric.node), ranks + 1) if ranks % n == 0)

    def _place(self, program: Program) -> Place:
        """Ranks fill their nodes evenly. Raises RewriterError where they do not fit."""
        ranks, nodes, node = math.prod(program.mesh.values()), self._nodes(program), self.fabric.node
        each = -(-ranks // nodes)
        if ranks % nodes or each > node:
            raise RewriterError(
                f"--nodes {nodes}: {ranks} ranks on nodes of {node} ({self.fabric.name}) cannot be spread evenly over "
                f"{nodes}. The fewest: --nodes {self._fewest(ranks)}"
            )
        numbers = tuple(r // each * node + r % each for r in range(ranks))
        return Place(numbers, program.mesh, self.workload.graphed)


def _communicated(done: _Simulated) -> list[Call]:
    """The collectives of both passes, each once."""
    listed = [step for calls in done.steps for made in calls for step in made if isinstance(step, Begin)]
    return list(dict.fromkeys(part for begin in listed for part in begin.parts if isinstance(part, Call)))


def with_front(points: Sequence[PredictedPoint]) -> tuple[PredictedPoint, ...]:
    """The points with `front` set: of those that fit, no other is at least as good in both and better in one."""

    def beats(one: PredictedPoint, other: PredictedPoint) -> bool:
        faster = one.seconds_per_token - other.seconds_per_token
        fuller = one.tokens_per_second_per_gpu - other.tokens_per_second_per_gpu
        return one.fits and faster <= 0 <= fuller and (faster, fuller) != (0, 0)

    return tuple(replace(p, front=p.fits and not any(beats(other, p) for other in points)) for p in points)


def bytes_per_rank(
    program: Program, batch: int, prompt: int, generate: int, *, plain: bool = False, all_logits: bool = False,
    weights: WeightFormat | None = None, cache: str | None = None, stages: int = 1,
) -> int:  # fmt: skip
    """Bytes of weights, of keys and values of all tokens, of states, and of the largest temporaries of the prefill.

    An estimate, as `analysis.memory` is: temporaries are the widest block's projections and four values as wide as the
    residual stream, of all tokens of a rank, the scores of one attention that no fused kernel computes, and the logits
    of the last token of each sequence, or with `all_logits` of each token. `plain`: no kernel is fused. Windows keep no
    more tokens than their size; ranks that share tokens keep their own. `weights`, `cache`: as in
    `Workload`. `stages`: the layers are on so many times the ranks, in equal parts, and as many parts of the batch
    follow each other.
    """
    held = memory(program)
    shared = program.mesh.get("sp", 1)
    kept = cache_elements(program, prompt + generate) * (model_dtype_bytes(program) if cache is None else 1)
    temporary = -(-prompt // shared) * (held.block_per_token + 4 * held.stream_per_token)
    temporary += held.logits_per_token * (prompt if all_logits else 1)
    if shared == 1:
        temporary += prompt * prompt * _bytes_per_pair(program, plain)
    stored = stored_weights(weights, quantization_settings(program.source.config))
    named = () if stored is None else parameters_of_format(program, stored)
    elements = sum(math.prod(program.parameters[name].shape) for name in named)
    spared = 0 if stored is None else round(elements * (model_dtype_bytes(program) - stored.bits / 8))
    stored_bytes = held.parameters_per_rank - spared + batch * (kept + held.states_per_row)
    return -(-stored_bytes // stages) + -(-batch // stages) * temporary


def _bytes_per_pair(program: Program, plain: bool) -> int:
    """Bytes per query and key, in the layer that holds most: with a softcap or sinks, or where all are `plain`, scores
    in the model's dtype, and their softmax in fp32 and in the model's dtype (`runtime.attention.cached`)."""
    heads = [
        int(marks(node).local_q_heads or args_of(node)[0].meta["val"].shape[1])
        for _, node in attentions(program)
        if plain or node.kwargs.get("softcap") is not None or node.kwargs.get("sinks") is not None
    ]
    return max(heads, default=0) * (2 * model_dtype_bytes(program) + 4)
