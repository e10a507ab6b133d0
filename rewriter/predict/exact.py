"""Choices that leave the model unchanged: faster sums, fewer GPUs to a replica, stages, drafts.

A choice is a layout (tensor-parallel ranks, stages, replicas) with options of an engine (`predict.engines`). Sums are
those of the fastest library that the engine may use, for every message. The rest is as `rewrite predict` simulates it:

- L2 prefetch: while a sum is waited for, the next kernels' weights are read into the L2 cache, of which a share may be
  set aside. Hidden is the least of the sum, of that share and of the weights at the memory's rate.
- sequence parallelism: in a prefill each sum is a reduce-scatter, a norm of a rank's own tokens, and an all-gather.
- quantized prompt sums: the prefill of `tensor-parallel-int8`, the decode step of the standard model.
- replicas: each serves its share of the batch.
- stages: p microbatches follow each other, so that a token takes a pass over all stages for a p-th of the batch and p
  messages; parts of a prefill, of which the last attends to most, follow each other, too: it takes a stage's time for
  all of them, and that of the last one, with a message, in each of the other p - 1 stages.
- a draft of k tokens, of which each is accepted with probability a: a step yields (1 - a^(k+1)) / (1 - a) tokens
  (Leviathan et al., arXiv 2211.17192, equation 1) and takes one pass over k + 1 tokens and k of the draft, each as long
  as one layer and what is outside of the layers, as a head for multi-token prediction is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from rewriter.common.errors import RewriterError
from rewriter.fabric import SOCKETS, Call
from rewriter.ir import Program
from rewriter.ir.communication import model_dtype_bytes
from rewriter.predict.analytic import Predictor
from rewriter.predict.candidates import Candidates
from rewriter.predict.engines import OptionName, engine_named, options
from rewriter.predict.results import ExactChoice, FirstToken
from rewriter.predict.workload import FIRST_TOKEN_PROMPTS, Draft, ForwardPass
from rewriter.recipes.apply import load_recipe

_PART = 2048  # tokens of a prompt that go through the stages together, at least
_SUMS: tuple[OptionName, ...] = ("one-shot-pcie", "one-shot-roce", "fused-norm")
_STANDARD, _QUANTIZED = "tensor-parallel", "tensor-parallel-int8"


@dataclass
class ExactChoices:
    """The choices of one model on a predictor's workload and fabric, for an engine by name."""

    predictor: Predictor
    candidates: Candidates
    engine: str = "vllm"
    draft: Draft | None = None
    programs: dict[tuple[str, int], Program | None] = field(default_factory=dict)

    def all(self) -> list[ExactChoice]:
        """All that can be simulated: plain tensor parallelism first, with each option alone, then other layouts.

        Raises RewriterError for an unknown engine, and where the standard model cannot be simulated at all.
        """
        ranks = self.predictor.workload.tp
        plain = self._choice(f"TP {ranks}" if ranks > 1 else "1 GPU", ranks)
        available = self.available
        over_all = [self._nearest()] if plain is None else [plain, *(self._with(name) for name in self._applicable())]
        if plain is not None and len(available) > 1:
            over_all.append(self._choice(f"TP {ranks}, all of these", ranks, names=available))
        drafted = [] if self.draft is None or plain is None else [self._drafted(plain, available)]
        found = [*over_all, *self._replicas(available), *self._stages(available), *drafted]
        choices = [one for one in found if one is not None]
        if not choices:
            raise RewriterError(f"{self.predictor.fabric.name}: it cannot run the standard model on {ranks} ranks")
        return choices

    def _nearest(self) -> ExactChoice | None:
        """The most of the GPUs that heads divide by, where they do not divide by all."""
        ranks = self.predictor.workload.tp
        fewer = (self._choice(f"TP {degree} on {degree} of {ranks} GPUs", degree) for degree in range(ranks - 1, 1, -1))
        return next((one for one in fewer if one is not None), None)

    # --- options ---

    @property
    def libraries(self) -> tuple[str, ...]:
        """Those whose all-reduces the engine takes without options; none where the fabric is by formula."""
        known = self.predictor.fabric.libraries
        return tuple(name for name in ("nccl", "gloo", SOCKETS, engine_named(self.engine).library) if name in known)

    @property
    def available(self) -> list[OptionName]:
        """The options for every layout that the engine has on this fabric."""
        return [name for name in self._applicable() if name in (*_SUMS, "l2-prefetch") and self._release(name)]

    def usable(self, names: Sequence[OptionName]) -> str | tuple[str, ...] | None:
        """The libraries of the engine with these options, or the one that the user named; None where the fabric is by
        formula."""
        if (named := self.predictor.cluster.library) is not None:
            return named
        extra = [library for name in names for library in options()[name].libraries]
        known = self.predictor.fabric.backends
        return tuple(library for library in (*self.libraries, *extra) if library in known) or None

    def _release(self, name: OptionName) -> str | None:
        """The engine's switch of an option; None where no release has it."""
        release = options()[name].engines.get(self.engine)
        return None if release is None else release.switch

    def _asks(self, name: OptionName) -> str:
        """The needs of an option: of machine and model, and of the engine."""
        release, needs = options()[name].engines.get(self.engine), options()[name].needs
        since = "" if release is None or not release.since else f"{self.engine} {release.since} or newer"
        return ", ".join(said for said in (since, needs) if said)

    def _applicable(self) -> list[OptionName]:
        """Options that this fabric and workload can have, layouts aside."""
        if self.predictor.workload.tp < 2:
            return []
        backends = self.predictor.fabric.backends if self.predictor.cluster.library is None else ()
        found = [name for name in _SUMS if any(library in backends for library in options()[name].libraries)]
        cached: list[OptionName] = ["l2-prefetch"] if self.predictor.fabric.device.l2_bytes else []
        return [*found, *cached, "sequence-parallel", "quantized-prompt-sums"]

    def _with(self, name: OptionName) -> ExactChoice | None:
        ranks = self.predictor.workload.tp
        return self._choice(f"TP {ranks}, {options()[name].title}", ranks, names=[name])

    # --- layouts ---

    def _replicas(self, available: Sequence[OptionName]) -> Iterator[ExactChoice]:
        """The layouts of replicas that fit and lead in something."""
        load, ranks = self.predictor.workload, self.predictor.workload.tp
        found = []
        for degree in (d for d in range(1, ranks) if ranks % d == 0):
            count, each = ranks // degree, -(-load.batch * degree // ranks)
            words = f"{count} replicas of {degree} GPU{'s' * (degree > 1)}"
            one = self._choice(words, degree, batch=each, replicas=count, names=["replicas", *available])
            if one is not None and one.fits:
                used = -(-load.batch // each)
                rate = load.batch * load.generate / one.generation_seconds(load.generate)
                some = () if used == count else (f"{words}: the batch of {load.batch} takes {used} of them",)
                found.append(replace(one, tokens_per_second=rate, notes=(*one.notes, *some)))
        yield from _leading(found)

    def _stages(self, available: Sequence[OptionName]) -> Iterator[ExactChoice]:
        """The layouts of stages that fit and lead in something."""
        ranks, found = self.predictor.workload.tp, []
        layers = self.candidates.original.source.num_layers
        for stages in (p for p in range(2, ranks + 1) if ranks % p == 0 and p <= layers):
            one = self._staged(stages, ranks // stages, available)
            if one is not None and one.fits:
                found.append(one)
        yield from _leading(found)

    def _staged(self, stages: int, degree: int, available: Sequence[OptionName]) -> ExactChoice | None:
        load = self.predictor.workload
        each = -(-load.batch // stages)
        words = f"{stages} stages of {degree} GPU{'s' * (degree > 1)}"
        one = self._choice(words, degree, batch=each, stages=stages, names=["pipeline", *available])
        program = self._program(_STANDARD, degree)
        if one is None or program is None:
            return None
        try:
            return self._over_stages(one, program, self._on(degree, each, available))
        except RewriterError:  # the fabric sends nothing so far
            return None

    def _over_stages(self, one: ExactChoice, program: Program, on: Predictor) -> ExactChoice:
        """`one`, of a microbatch that passes all stages, as the stages' own. `on`: predicts a stage's ranks."""
        load, stages, each = self.predictor.workload, one.stages, on.workload.batch
        token = int(program.source.config.get("hidden_size") or 0) * model_dtype_bytes(program)

        def prefill(seconds: float, prompt: int) -> float:
            whole = seconds * load.batch / each  # of all sequences, one stage after the other
            part = min(prompt, _PART)
            before = prompt - part
            given = ForwardPass(1, part, keys=prompt + load.generate if before else 0, before=before)
            last = min(on.seconds_of(program, given), whole)
            return (whole + (stages - 1) * last) / stages + (stages - 1) * self._send(part * token, one.tp)

        first = tuple(
            FirstToken(
                f.prompt, prefill(f.seconds, f.prompt), self.predictor.fits(program, load.batch, f.prompt, stages)
            )
            for f in one.time_to_first_token
        )
        one = replace(
            one, decode_seconds=one.decode_seconds + stages * self._send(each * token, one.tp),
            prefill_seconds=prefill(one.prefill_seconds, load.prompt), time_to_first_token=first,
        )  # fmt: skip
        return replace(one, tokens_per_second=load.batch * load.generate / one.generation_seconds(load.generate))

    def _send(self, nbytes: int, distance: int) -> float:
        dtype = "bfloat16"
        return self.predictor.model.delay(
            Call("send", nbytes, (0, distance), dtype, self.predictor.workload.graphed)
        ).seconds

    # --- one choice ---

    def _program(self, recipe: str, degree: int) -> Program | None:
        key = (recipe, degree)
        if key not in self.programs:
            try:
                self.programs[key] = self.candidates.one(load_recipe(recipe), degree).program
            except RewriterError:  # heads that the degree does not divide, messages that cannot be quantized
                self.programs[key] = None
        return self.programs[key]

    def _on(self, degree: int, batch: int, names: Sequence[OptionName]) -> Predictor:
        """A predictor of `degree` ranks with these options."""
        base = self.predictor
        load = replace(
            base.workload, tp=degree, batch=batch, nodes=base.workload.nodes if degree == base.workload.tp else None,
            l2_prefetch="l2-prefetch" in names, sequence_parallel="sequence-parallel" in names,
        )  # fmt: skip
        return Predictor(load, replace(base.cluster, library=self.usable(names)), base.runner, base.durations)

    def _choice(
        self,
        words: str,
        degree: int,
        *,
        batch: int | None = None,
        replicas: int = 1,
        stages: int = 1,
        names: Sequence[OptionName] = (),
    ) -> ExactChoice | None:
        """None where it cannot be simulated."""
        load, program = self.predictor.workload, self._program(_STANDARD, degree)
        quantized = self._program(_QUANTIZED, degree) if "quantized-prompt-sums" in names else program
        if program is None or quantized is None:
            return None
        predictor = self._on(degree, batch or load.batch, names)
        try:
            done = predictor.simulate(program, record=False)
            prompted = done if quantized is program else predictor.simulate(quantized, record=False)
            first = tuple(predictor.first_token(quantized, prompt) for prompt in FIRST_TOKEN_PROMPTS)
        except RewriterError:
            return None
        held = load.batch if stages > 1 else batch or load.batch  # each stage keeps its keys of all sequences
        return self._told(
            ExactChoice(
                name=words, tp=degree, stages=stages, replicas=replicas, prefill_seconds=prompted.prefill.seconds,
                decode_seconds=done.decode.seconds, fits=predictor.fits(program, held, stages=stages),
                time_to_first_token=first,
            ),
            names,
        )  # fmt: skip

    def _told(self, one: ExactChoice, names: Sequence[OptionName]) -> ExactChoice:
        """The choice, with how its options are switched on, and whether the engine has them."""
        load, known = self.predictor.workload, options()
        lacking = [name for name in names if self._release(name) is None]
        return replace(
            one,
            options=tuple(names),
            switches=tuple(switch for name in names if (switch := self._release(name)) is not None),
            available=not lacking,
            rounds=any(known[name].rounds for name in names),
            tokens_per_second=load.batch * load.generate / one.generation_seconds(load.generate),
            notes=tuple(f"{known[name].does}: {said}" for name in names if (said := self._asks(name))),
        )

    def _drafted(self, plain: ExactChoice, available: Sequence[OptionName]) -> ExactChoice:
        draft, load = self.draft, self.predictor.workload
        assert draft is not None
        program = self._program(_STANDARD, load.tp)
        assert program is not None  # `plain` is of it
        predictor = self._on(load.tp, load.batch, available)
        keys = load.prompt + load.generate
        verify = predictor.seconds_of(program, ForwardPass(load.batch, draft.tokens + 1, keys=keys, logits=0))
        outside, inside = predictor.outside_of_layers(program)
        step = verify + draft.tokens * (outside + inside / max(1, program.source.num_layers))
        decode = step / draft.expected_tokens
        words = f"{plain.name}, a draft of {draft.tokens} tokens, {draft.acceptance:.0%} accepted"
        prefill = predictor.simulate(program, record=False).prefill.seconds
        one = replace(plain, name=words, decode_seconds=decode, prefill_seconds=prefill)
        return self._told(one, ["draft", *available])


def _leading(found: Sequence[ExactChoice]) -> list[ExactChoice]:
    """Those that are fastest in a generation, a decode step, the prefill, or the first token of a prompt."""

    def first_token(prompt: int) -> Callable[[ExactChoice], float]:
        firsts = ((one, first_token_of(one, prompt)) for one in found)
        known = {one.name: first.seconds for one, first in firsts if first is not None and first.fits}
        return lambda one: known.get(one.name, math.inf)

    figures: list[Callable[[ExactChoice], float]] = [
        lambda one: -one.tokens_per_second, lambda one: one.decode_seconds, lambda one: one.prefill_seconds,
        *map(first_token, FIRST_TOKEN_PROMPTS),
    ]  # fmt: skip
    leads = {min(found, key=figure).name for figure in figures} if found else set()
    return sorted((one for one in found if one.name in leads), key=figures[0])


def comparable(choices: Sequence[ExactChoice]) -> list[ExactChoice]:
    """Those that recipes are compared with: that the engine has, that fit in memory, round no sum and need no draft;
    where nothing fits, those that do not."""
    had = [one for one in choices if one.available and not one.rounds and "draft" not in one.options]
    return [one for one in had if one.fits] or had


def best_exact(choices: Sequence[ExactChoice]) -> ExactChoice:
    """The fastest generation of those that recipes are compared with."""
    return max(comparable(choices), key=lambda one: one.tokens_per_second)


def first_token_of(one: ExactChoice, prompt: int) -> FirstToken | None:
    """Its time to first token for a prompt that was predicted."""
    return next((first for first in one.time_to_first_token if first.prompt == prompt), None)
