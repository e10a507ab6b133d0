"""`rewrite adapt`: from a rewritten checkpoint and data to a trained one."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from rewriter.adapt import checkpoints, output, prompt_weights, prompts, students
from rewriter.adapt import options as settings_of
from rewriter.adapt.data_set import OwnText, read_data
from rewriter.adapt.least_squares import TOKENS, fit_keys
from rewriter.adapt.loop import METRICS, AdaptTrainer, tensorboard
from rewriter.adapt.models import Model, trunk_of
from rewriter.adapt.objective import loss_of, stack
from rewriter.adapt.options import AdaptOptions
from rewriter.adapt.prompts import Row
from rewriter.adapt.ranks import join
from rewriter.adapt.schedule import DEFAULTS, WIDTH, RunSizes, plan
from rewriter.adapt.students import Run
from rewriter.check.drift import load_tokenizer
from rewriter.check.saved_output import check_files, check_weights
from rewriter.common.errors import RewriterError
from rewriter.common.numbers import json_text
from rewriter.common.packages import require
from rewriter.common.run_context import RunContext, silent
from rewriter.common.text_settings import stream_width
from rewriter.common.tokenizer_code import own_code
from rewriter.convert.preflight import check_free
from rewriter.convert.rewritten_source import Opened, open_output, recipe_of
from rewriter.convert.save_options import Level
from rewriter.emit.files.output_directory import sha256_of
from rewriter.output.manifest import AdaptationEntry, gap_closed
from rewriter.recipes.verdicts import of_adaptation
from rewriter.runtime.loading import rank_device
from rewriter.tracing.meta_model import load_config
from rewriter.weights import Checkpoint


@dataclass(frozen=True)
class AdaptReport:
    """The result of a run: its directory, the losses by name (nats per target), and the manifest's entry. `source`: the
    directory that was trained."""

    out: str
    losses: dict[str, float]
    adaptation: dict[str, Any]
    source: str = ""

    def to_json(self, words: Sequence[str] = ()) -> str:
        """The report as JSON, with the share of the gap to the original's loss that was closed (`gap_closed`), the
        verdict on the output and the next command (`verdict`, `next`), with the options of the `words` that were given
        after `rewrite`."""
        values = asdict(self)
        closed = gap_closed(self.losses) if "original" in self.losses else None
        return json_text(values | {"gap_closed": closed} | of_adaptation(values, words)._asdict(), indent=2)


def adapt(
    directory: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    evaluation: str | os.PathLike[str] | None = None,
    teacher: str | os.PathLike[str] | None = None,
    resume: bool = False,
    verify: Level = "shrunken",
    options: AdaptOptions = AdaptOptions(),
    context: RunContext = RunContext(),
) -> AdaptReport:
    """Train the checkpoint in `directory`, which `rewrite` wrote, on `data`, and write the result to `out`.

    `data` and `evaluation` are files of one JSON object per line ("messages" or "text"), ids of the Hub, or `self:N`:
    N tokens that the original writes itself, which is also what is read where no `data` are given. Without
    `evaluation`, some rows of the data are held out. `teacher` is the directory of the original model; by default it is
    the same weights under the original wiring. Where it is known, the method is distillation unless `options` say
    otherwise, and settings follow from the number of tokens (`Budget`). Under torchrun, ranks that `options` does not
    give to tensors (tp) or sequences (sp) are data-parallel. Every rank calls it; all get the report.

    An interrupted run leaves its checkpoints in `.NAME.adapting` next to `out`, where `resume` continues it: step for
    step with the same losses. Raises RewriterError for bad input, before anything is written, and for a loss that is
    not finite; VerificationError where what was written does not compute what the recipe says, and where weights, code
    or config of `directory` have changed since they were written.
    """
    opened, final = open_output(directory, trained=True), Path(os.path.abspath(out))
    known = teacher is not None or opened.manifest.adaptation is None
    chosen = options.resolved(known)
    width = stream_width(opened.config) or WIDTH
    if chosen.prompt_weights and chosen.tokens is None:
        chosen = replace(chosen, tokens=TOKENS * width)
    require("adapt", "rewrite adapt", "accelerate")
    if chosen.lora:
        require("adapt", "--lora", "peft")
    given = settings_of.check_settings(chosen.settings)
    students.require_serves(opened, chosen)
    place = checkpoints.place_of(final)
    original = students.original_directory(opened, chosen, place / "source", teacher)
    device = rank_device("cpu" if given.get("use_cpu") else None)
    ranks = join(chosen.tp * chosen.sp, device, chosen.ep)
    ranks.on_first(lambda: _check(opened, final))
    if ranks.world > 1 and (optim := given.get("optim", "adamw_torch")) not in settings_of.ELEMENTWISE:
        raise RewriterError(
            f"--set optim={optim}: ranks step pieces of tensors, so that it would train otherwise than on one device. "
            f"Use one of {', '.join(settings_of.ELEMENTWISE)}, or one rank"
        )
    if own_code(opened.root):
        load_tokenizer(str(opened.root), context.trust_remote_code)  # may be refused
    context = context if ranks.first else replace(context, progress=silent)
    own_text = OwnText(opened, chosen, teacher, known, ranks, device, context)
    file = own_text.file_of(data)
    measured = None if evaluation is None else own_text.file_of(evaluation, held_out=True)
    seed = int(given.get("seed", DEFAULTS["seed"]))
    rows = read_data(opened, chosen, file, measured, seed, context)
    if (phase := prompts.phase_of(opened, chosen)) is not None:
        rows = prompts.with_prompts(rows, phase, chosen, seed)
    elif chosen.prompt_weights:
        raise RewriterError(
            f"--prompt-weights: {opened.root} computes all tokens alike. Rewrite with a recipe that has phase: prompt, "
            "or leave it out"
        )
    count = len(rows.rows)  # type: ignore[arg-type]
    both = phase is not None and not chosen.prompt_weights
    settings, sizes = plan(recipe_of(opened).adapt, chosen, count, rows.length, width, ranks.replicas, device, both)
    if chosen.prompt_weights:
        settings = {name: value for name, value in settings.items() if name in settings_of.FITTING}
        sizes = RunSizes(1, 1, 1, min(sizes.steps * sizes.batch, count))
    run = Run(opened, chosen, settings, rows, sizes, ranks, device, place, original, context)
    described = {
        "checkpoint": Checkpoint.open(opened.root).fingerprint(),
        "data": _identity(file),
        "evaluation": None if measured is None else _identity(measured),
        "teacher": None if teacher is None else os.path.abspath(teacher),
        "options": {k: v for k, v in asdict(chosen).items() if k != "settings"},
        "settings": {k: v for k, v in settings.items() if k not in settings_of.FREE},
        "rows per step": sizes.batch,
        "steps": sizes.steps,
    }
    with ExitStack() as claim:
        ranks.on_first(lambda: claim.enter_context(checkpoints.claimed(final, described, resume)))
        entry = _train(run, final, verify)
    return AdaptReport(os.fspath(out), entry.losses, entry.model_dump(), os.fspath(directory))


def _check(opened: Opened, out: Path) -> None:
    """Refuse an occupied `out`, and a directory whose weights, code or config were changed: they decide what is
    trained. Cards and settings of generation may be edited."""
    check_free(out)
    names = opened.manifest.files
    read = [name for name in names if name == "config.json" or name.endswith((".safetensors", ".py"))]
    check_files(opened.root, opened.manifest, read)
    check_weights(opened.root, opened.manifest)


def _identity(source: str) -> str:
    """The hash of a file, or the id of a data set of the Hub."""
    return f"sha256 {sha256_of(Path(source))}" if Path(source).is_file() else source


def _train(run: Run, out: Path, verify: Level) -> AdaptationEntry:
    """Train, and write the result to `out`."""
    ranks = run.ranks
    ranks.on_first(lambda: students.prepare_source(run))
    if run.options.prompt_weights:
        prompt_weights.require_keys(load_config(run.source))
    torch.manual_seed(int(run.settings["seed"]))  # adapters start at random, the same on all ranks
    run.context.progress("loading the model")
    built = students.student(run)
    theirs, facts = _measured_before(run, built)
    if run.options.prompt_weights:
        assert theirs is not None
        _fit(run, built.model.module, theirs.module)
    else:
        _descend(run, built, theirs)
        theirs = None
    run.context.progress("writing the result")
    output.merge(built)
    output.round_to(built.model.module, run.source, run.opened.dtype)
    losses: dict[str, float] = {name: facts[name] for name in ("original", "before") if name in facts}
    losses["after"] = run.measured(_judged(run, built.model, theirs))
    output.collect(run, built)
    entry: AdaptationEntry = ranks.on_first(lambda: output.entry(run, losses))
    ranks.on_first(lambda: output.write(run, out, entry, verify))
    return entry


def _descend(run: Run, built: students.Student, theirs: Model | None) -> None:
    """Train `built` by gradients."""
    ranks, trunk = run.ranks, None
    kept = ranks.same(None if (last := checkpoints.last(run.place)) is None else str(last))
    # noise and sharding are in the way of a trunk
    noisy = run.settings.get("neftune_noise_alpha")
    if theirs is not None and run.options.train == "rewritten" and built.mesh is None and not noisy:
        trunk = trunk_of(built.model.module, theirs.module)
    callbacks = tensorboard(run.place, 0 if kept is None else checkpoints.step_of(kept)) if ranks.first else []
    trainer = AdaptTrainer(run, built, loss_of(run.options, run.autocast, theirs, trunk), callbacks, built.model)
    torch.manual_seed(int(run.settings["seed"]) + 1 + ranks.replica)  # dropout differs from row to row
    trainer.train(resume_from_checkpoint=kept)


def _fit(run: Run, student: nn.Module, theirs: nn.Module) -> None:
    """Fit projections of keys and values to those of the original, on rows that the seed draws."""
    run.context.progress("fitting projections of keys and values")
    began, rows = time.perf_counter(), cast("Sequence[Row]", run.data.rows)
    drawn = torch.randperm(len(rows), generator=torch.Generator().manual_seed(int(run.settings["seed"])))
    batch = stack([rows[i] for i in drawn[: run.sizes.batch].tolist()])
    errors = fit_keys(student, theirs, {name: value.to(run.device) for name, value in batch.items()})
    tokens = run.sizes.batch * run.data.length
    loss = sum(after for _, after in errors.values()) / max(len(errors), 1)
    seconds = time.perf_counter() - began
    line = {"step": 1, "tokens": tokens, "loss": loss, "tokens_per_second": tokens / seconds}
    run.ranks.on_first(lambda: (run.place / METRICS).write_text(f"{json_text(line)}\n", encoding="utf-8") and None)


def _judged(run: Run, trained: Model, theirs: Model | None) -> Model:
    """The model that evaluates rows: the trained one, or the original that reads its keys and values."""
    if not run.options.prompt_weights:
        return trained
    assert theirs is not None
    return prompt_weights.Prefilled(trained, theirs)


def _measured_before(run: Run, built: students.Student) -> tuple[Model | None, dict[str, Any]]:
    """The teacher, where training needs one, and the losses before training, which a resumed run remembers."""
    distills = run.options.method == "distill"
    facts = run.ranks.on_first(lambda: checkpoints.remember(run.place))
    theirs: Model | None = None
    if run.original is not None and (distills or "original" not in facts):
        theirs = students.teacher(built, run, run.original)
    if "before" not in facts:
        run.context.progress("measuring the loss before training")
        losses = {} if theirs is None else {"original": run.measured(theirs)}
        losses["before"] = run.measured(_judged(run, built.model, theirs))
        facts = run.ranks.on_first(lambda: checkpoints.remember(run.place, **losses))
    return theirs if distills else None, facts
