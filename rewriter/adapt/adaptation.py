"""From a rewritten checkpoint and data to a trained one: what `rewrite adapt` does."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rewriter.adapt import adapted_output, checkpoints, student_setup
from rewriter.adapt import options as settings_of
from rewriter.adapt import teacher as teachers
from rewriter.adapt.anneal_callback import AnnealingCallback
from rewriter.adapt.anneal_schedule import Annealing, annealed_layers
from rewriter.adapt.batches import Order
from rewriter.adapt.evaluate import evaluate
from rewriter.adapt.isolation import isolates_segments
from rewriter.adapt.job import AdaptJob, identity
from rewriter.adapt.objective import loss_of
from rewriter.adapt.options import Options
from rewriter.adapt.refit import refit_to_original
from rewriter.adapt.rewritten_source import Opened, open_output, recipe_of
from rewriter.adapt.run_data import read_data
from rewriter.adapt.run_log import Metrics, tensorboard
from rewriter.adapt.run_ranks import RunRanks, join
from rewriter.adapt.students import Model
from rewriter.adapt.trainer import AdaptTrainer, training_arguments
from rewriter.common.errors import RewriterError
from rewriter.convert.conversion import check_free
from rewriter.convert.save_options import Level
from rewriter.runtime.load import rank_device
from rewriter.weights import Checkpoint

Progress = Callable[..., None]


def _silent(*_: Any, **__: Any) -> None:
    pass


@dataclass(frozen=True)
class AdaptReport:
    """What a run did: its result, the losses by name (nats per target), and the manifest's entry."""

    out: str
    losses: dict[str, float]
    adaptation: dict[str, Any]

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)


def adapt(
    directory: str | os.PathLike[str],
    *,
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    evaluation: str | os.PathLike[str] | None = None,
    teacher: str | os.PathLike[str] | None = None,
    resume: bool = False,
    verify: Level = "shrunken",
    options: Options | None = None,
    progress: Progress = _silent,
) -> AdaptReport:
    """Train the checkpoint in `directory`, which `rewrite` wrote, on `data`, and write the result to `out`.

    `data` and `evaluation` are files of one JSON object per line ("messages" or "text"), or ids of the Hub; without
    `evaluation`, some rows of the data are held out. `teacher` is the directory of the original model; by default it is
    the same weights under the original wiring. Under torchrun, ranks that `options` does not give to tensors (tp) or
    sequences (sp) are data-parallel. Every rank calls it; all get the report.

    An interrupted run leaves its checkpoints in `.NAME.adapting` beside `out`, where `resume` continues it: step for
    step with the same losses. Raises RewriterError for bad input, before anything is written, and for a loss that is
    not finite; VerificationError where what was written does not compute what the recipe says.
    """
    chosen = options or Options()
    settings = settings_of.check_settings(chosen.settings)
    opened = open_output(directory)
    student_setup.require_serves(opened, chosen)
    teachers.require_teacher(opened, chosen, teacher)
    place = Path(os.path.abspath(out))
    device = rank_device("cpu" if settings.get("use_cpu") else None)
    ranks = join(chosen.tp * chosen.sp, device, chosen.ep)
    ranks.on_first(lambda: check_free(place))
    if ranks.world > 1 and (optim := settings.get("optim", "adamw_torch")) not in settings_of.ELEMENTWISE:
        raise RewriterError(
            f"--set optim={optim}: ranks step pieces of tensors, so that it would train otherwise than on one device. "
            f"Use one of {', '.join(settings_of.ELEMENTWISE)}, or one rank"
        )
    run = _Adaptation(opened, place, chosen, settings, ranks, device, progress)
    return run.run(os.fspath(data), evaluation, teacher, resume, verify)


class _Adaptation:
    """One call of `adapt`: data, a student, its training, the result."""

    def __init__(
        self,
        opened: Opened,
        out: Path,
        options: Options,
        settings: Mapping[str, Any],
        ranks: RunRanks,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self.opened, self.out, self.options, self.ranks, self.device = opened, out, options, ranks, device
        self.recipe = recipe_of(opened)
        self.settings = {**settings_of.defaults(self.recipe.adapt), **settings}
        self.seed = int(self.settings["seed"])
        self.data_seed = int(self.settings.get("data_seed", self.seed))  # of the order of rows
        self.bf16 = bool(self.settings.get("bf16"))
        self.progress: Progress = progress if ranks.first else _silent

    def run(self, data: str, evaluation: Any, teacher: Any, resume: bool, verify: Level) -> AdaptReport:
        self.data = read_data(self.opened, self.options, data, evaluation, self.seed, self.progress)
        rows = len(self.data.rows)  # type: ignore[arg-type]
        self.sizes = settings_of.schedule(self.settings, self.recipe.adapt, rows, self.ranks.replicas)
        # a warm-up longer than the run would end below the learning rate that was asked for
        self.settings["warmup_steps"] = min(self.settings["warmup_steps"], max(0, self.sizes.steps - 1))
        self.place = Path(self.ranks.on_first(lambda: self._open_job(data, evaluation, teacher, resume)))
        done = False
        try:
            report = self._train(teacher, verify)
            done = True
        finally:
            if self.ranks.first:
                self.job.close(done)
        return report

    def _open_job(self, data: str, evaluation: Any, teacher: Any, resume: bool) -> str:
        described = {
            "checkpoint": Checkpoint.open(self.opened.root).fingerprint(),
            "data": identity(data),
            "evaluation": None if evaluation is None else identity(os.fspath(evaluation)),
            "teacher": None if teacher is None else os.path.abspath(teacher),
            "options": {k: v for k, v in asdict(self.options).items() if k != "settings"},
            "settings": {k: v for k, v in self.settings.items() if k not in settings_of.FREE},
            "rows per step": self.sizes.batch,
            "steps": self.sizes.steps,
        }
        self.job = AdaptJob(self.out, described, resume)
        return str(self.job.place)

    def _measured(self, model: Model) -> float:
        """The loss on the rows that are not trained on."""
        batch = int(self.settings.get("per_device_eval_batch_size", self.sizes.micro_batch))
        return evaluate(model, self.data.held_out, batch, self.ranks, self.device, self.bf16)

    def _train(self, teacher: Any, verify: Level) -> AdaptReport:
        ranks, source = self.ranks, self.place / "source"
        ranks.on_first(lambda: student_setup.prepare_source(self.opened, source, self.options, self.seed))
        original = teachers.original_directory(self.opened, self.options, source, teacher)
        torch.manual_seed(self.seed)  # adapters start at random, alike on all ranks
        self.progress("loading the model")
        kept = ranks.same(None if (last := checkpoints.last(self.place)) is None else str(last))
        built = self._student(source, original, resumed=kept is not None)
        theirs, facts = self._measured_before(built, original)
        trainer = self._trainer(built, theirs, 0 if kept is None else checkpoints.step_of(kept))
        torch.manual_seed(self.seed + 1 + ranks.replica)  # dropout differs from row to row
        trainer.train(resume_from_checkpoint=kept)
        del theirs, trainer
        self.progress("writing the result")
        return self._write(built, source, facts, verify)

    def _student(self, source: Path, original: Path | None, resumed: bool) -> student_setup.Student:
        """The model to train: refitted, unless the run has gone on to training before."""
        options, ranks = self.options, self.ranks

        def refitted(module: nn.Module) -> None:
            if not options.refit or resumed:
                return
            found = refit_to_original(
                module, original, self.data.rows, options, self.sizes.micro_batch, self.data_seed,
                ranks, self.device, self._measured, self.progress,
            )  # fmt: skip
            ranks.on_first(lambda: self.job.remember(**found))

        built = student_setup.student(self.opened, source, self.place, options, ranks, self.device, self.bf16, refitted)
        if options.packing and not options.sharded and not isolates_segments(built.model.module):
            raise RewriterError(
                f"{self.opened.manifest.source.model_type}: in transformers, tokens of a packed row see those of other "
                "examples. Train with --no-packing, which pads every example to a row of its own"
            )
        return built

    def _measured_before(
        self, built: student_setup.Student, original: Path | None
    ) -> tuple[Model | None, dict[str, Any]]:
        """The teacher, where training needs one, and the losses before training, which a resumed run remembers."""
        ranks, distills = self.ranks, self.options.method == "distill"
        facts = ranks.on_first(lambda: self.job.remember())
        theirs: Model | None = None
        if original is not None and (distills or "original" not in facts):
            theirs = student_setup.teacher(built, original, self.place, self.options, ranks, self.device)
        if "before" not in facts:
            self.progress("measuring the loss before training")
            found = {} if theirs is None else {"original": self._measured(theirs)}
            found["before"] = self._measured(built.model)
            facts = ranks.on_first(lambda: self.job.remember(**found))
        return theirs if distills else None, facts

    def _trainer(self, built: student_setup.Student, theirs: Model | None, step: int) -> AdaptTrainer:
        ranks, options, data = self.ranks, self.options, self.data
        order = Order(len(data.rows), self.sizes, ranks, self.data_seed)  # type: ignore[arg-type]
        metrics = Metrics(self.place, self.sizes.batch * data.length, self.progress) if ranks.first else None
        callbacks: list[Any] = [] if metrics is None else [metrics, *tensorboard(self.place, step)]
        if built.annealed:
            layers = tuple(annealed_layers(built.model.module))
            callbacks.append(
                AnnealingCallback(built.model.module, Annealing(options.anneal, layers, options.anneal_order))
            )
        trainer = AdaptTrainer(
            built.model,
            loss_of(options, theirs, self.device, self.bf16),
            training_arguments(self.settings, self.sizes, self.place, self.device),
            data.rows,
            order,
            ranks,
            own=built.own,
            clip=built.clip,
            optimizer=built.make_optimizer,
            evaluation=lambda: {"eval_loss": self._measured(built.model)},
            callbacks=callbacks,
        )
        if metrics is not None:
            metrics.trainer = trainer
        return trainer

    def _write(
        self, built: student_setup.Student, source: Path, facts: Mapping[str, Any], verify: Level
    ) -> AdaptReport:
        """Merge, round and measure what was trained, and write the output directory."""
        ranks, place = self.ranks, self.place
        adapted_output.merge(built)
        adapted_output.round_to(built.model.module, getattr(torch, self.opened.dtype))
        losses = {name: facts[name] for name in ("original", "before", "refitted") if name in facts}
        losses["after"] = self._measured(built.model)
        adapted_output.collect(self.opened, built, source, place, ranks, self.options.tp)
        entry = ranks.on_first(
            lambda: adapted_output.entry(self.options, self.settings, self.data, self.sizes, losses, place, ranks)
        )
        ranks.on_first(lambda: adapted_output.write(self.opened, self.out, place, entry, verify, self.progress))
        return AdaptReport(str(self.out), entry.losses, entry.model_dump())
