"""From a rewritten checkpoint and data to a trained one: what `rewrite adapt` does."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from transformers import TrainingArguments

from rewriter.adapt import adapted_output, checkpoints, student_setup
from rewriter.adapt import options as settings_of
from rewriter.adapt import teacher as teachers
from rewriter.adapt.anneal_callback import AnnealingCallback
from rewriter.adapt.anneal_schedule import Annealing, annealed_layers
from rewriter.adapt.batches import Order, stack
from rewriter.adapt.evaluate import evaluate, hold_out
from rewriter.adapt.isolation import isolates_segments
from rewriter.adapt.job import Job
from rewriter.adapt.objective import loss_of
from rewriter.adapt.options import Options
from rewriter.adapt.refit import refit
from rewriter.adapt.rewritten_source import Opened, open_output, recipe_of, source_config, write_source
from rewriter.adapt.run_log import Metrics, tensorboard
from rewriter.adapt.run_ranks import Ranks, join
from rewriter.adapt.students import HuggingFaceModel, Model
from rewriter.adapt.token_rows import Counts, Rows, load_rows
from rewriter.adapt.trainer import AdaptTrainer, alone, on_device
from rewriter.analysis.sequence_layout import context_length
from rewriter.common.errors import RewriterError
from rewriter.convert.conversion import Level, check_free
from rewriter.runtime.load import rank_device
from rewriter.verify.drift import load_tokenizer
from rewriter.weights import Checkpoint

LONGEST_ROW = 4096  # tokens of a row where --length does not say, if the model has so many positions
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
    _require_teacher(opened, chosen, teacher)
    place = Path(os.path.abspath(out))
    device = rank_device("cpu" if settings.get("use_cpu") else None)
    ranks = join(chosen.tp * chosen.sp, device)
    ranks.on_first(lambda: check_free(place))
    if ranks.world > 1 and (optim := settings.get("optim", "adamw_torch")) not in settings_of.ELEMENTWISE:
        raise RewriterError(
            f"--set optim={optim}: ranks step pieces of tensors, so that it would train otherwise than on one device. "
            f"Use one of {', '.join(settings_of.ELEMENTWISE)}, or one rank"
        )
    run = _Run(opened, place, chosen, settings, ranks, device, progress)
    return run.go(os.fspath(data), evaluation, teacher, resume, verify)


def _require_teacher(opened: Opened, options: Options, teacher: Any) -> None:
    if options.method == "distill" and teacher is None and opened.manifest.adaptation is not None:
        raise RewriterError(
            f"{opened.root} has been trained since it was rewritten, so its weights are no longer the original's. Give "
            "the original model as --teacher"
        )


class _Run:
    """One call of `adapt`."""

    def __init__(
        self,
        opened: Opened,
        out: Path,
        options: Options,
        settings: Mapping[str, Any],
        ranks: Ranks,
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

    def go(self, data: str, evaluation: Any, teacher: Any, resume: bool, verify: Level) -> AdaptReport:
        rows, held_out, told = self._rows(data, evaluation)
        sizes = settings_of.schedule(self.settings, self.recipe.adapt, len(rows), self.ranks.replicas)  # type: ignore[arg-type]
        # a warm-up longer than the run would end below the learning rate that was asked for
        self.settings["warmup_steps"] = min(self.settings["warmup_steps"], max(0, sizes.steps - 1))
        job = self.ranks.on_first(lambda: self._open_job(data, evaluation, teacher, sizes, resume))
        self.run = Path(job)
        done = False
        try:
            report = self._train(rows, held_out, told, sizes, teacher, verify)
            done = True
        finally:
            if self.ranks.first:
                self.job.close(done)
        return report

    def _open_job(self, data: str, evaluation: Any, teacher: Any, sizes: Any, resume: bool) -> str:
        described = {
            "checkpoint": Checkpoint.open(self.opened.root).fingerprint(),
            "data": _identity(data),
            "evaluation": None if evaluation is None else _identity(os.fspath(evaluation)),
            "teacher": None if teacher is None else os.path.abspath(teacher),
            "options": {k: v for k, v in asdict(self.options).items() if k != "settings"},
            "settings": {k: v for k, v in self.settings.items() if k not in settings_of.FREE},
            "rows per step": sizes.batch,
            "steps": sizes.steps,
        }
        self.job = Job(self.out, described, resume)
        return str(self.job.place)

    # Data

    def _rows(self, data: str, evaluation: Any) -> tuple[Dataset, Dataset, dict[str, Any]]:
        tokenizer = load_tokenizer(str(self.opened.root))
        if tokenizer is None:
            raise RewriterError(
                f"{self.opened.root}: it has no tokenizer, so text cannot become tokens. Copy the source's tokenizer "
                "files into it"
            )
        length = self.options.length or min(context_length(self.opened.config), LONGEST_ROW)
        if length > context_length(self.opened.config):
            raise RewriterError(
                f"--length {length}: the model has {context_length(self.opened.config)} positions. Give fewer"
            )
        self.progress("reading the data")
        how: dict[str, Any] = {"length": length, "packing": self.options.packing}
        read = load_rows(data, tokenizer, too_long=self.options.too_long, **how)
        rows: Dataset = read
        held: Dataset
        if evaluation is not None:
            other = load_rows(os.fspath(evaluation), tokenizer, too_long=self.options.too_long, **how)
            held, words = other, f"{_public(evaluation)}, {other.counts.targets:,} targets"
        else:
            if len(read) < 2:
                raise RewriterError(
                    f"{data}: {len(read)} row of {length} tokens; at least 2 are needed, of which one is held out. "
                    "Give more data, a smaller --length, or --eval"
                )
            rows, held = hold_out(read, self.seed)
            words = f"{len(held)} of {len(read)} rows of the data, which were not trained on"
        told = {"data": _public(data), "evaluation": words, "length": length, "counts": _counts(read)}
        return rows, held, told

    # Training

    def _train(
        self,
        rows: Dataset,
        held_out: Dataset,
        told: dict[str, Any],
        sizes: settings_of.Schedule,
        teacher: Any,
        verify: Level,
    ) -> AdaptReport:
        run, ranks, options = self.run, self.ranks, self.options
        source = run / "source"
        ranks.on_first(lambda: self._write_source(source))
        original = self._original(source, teacher)
        batch = int(self.settings.get("per_device_eval_batch_size", sizes.micro_batch))

        def measured(model: Model) -> float:
            return evaluate(model, held_out, batch, ranks, self.device, self.bf16)

        torch.manual_seed(self.seed)  # adapters start at random, alike on all ranks
        self.progress("loading the model")
        kept = ranks.same(None if (last := checkpoints.last(run)) is None else str(last))

        def refitted(module: nn.Module) -> None:
            if options.refit and kept is None:
                self._refit(module, original, rows, sizes, lambda model: measured(model))

        built = student_setup.student(self.opened, source, run, options, ranks, self.device, self.bf16, refitted)
        self._check_packing(built)
        theirs: Model | None = None
        facts = ranks.on_first(lambda: self.job.remember())
        if options.method == "distill" or "original" not in facts:
            theirs = (
                None if original is None else student_setup.teacher(built, original, run, options, ranks, self.device)
            )
        if "before" not in facts:
            self.progress("measuring the loss before training")
            found = {} if theirs is None else {"original": measured(theirs)}
            found["before"] = measured(built.model)
            facts = ranks.on_first(lambda: self.job.remember(**found))
        if options.method == "sft":
            theirs = None
        trainer = self._trainer(
            built, theirs, rows, sizes, told["length"], 0 if kept is None else checkpoints.step_of(kept),
            lambda: {"eval_loss": measured(built.model)},
        )  # fmt: skip
        torch.manual_seed(self.seed + 1 + ranks.replica)  # dropout differs from row to row
        trainer.train(resume_from_checkpoint=kept)
        del theirs, trainer
        self.progress("writing the result")
        adapted_output.merge(built)
        adapted_output.round_to(built.model.module, getattr(torch, self.opened.dtype))
        found = {name: facts[name] for name in ("original", "before", "refitted") if name in facts}
        found["after"] = measured(built.model)
        adapted_output.collect(self.opened, built, source, run, ranks, options.tp)
        entry = ranks.on_first(lambda: adapted_output.entry(options, self.settings, told, sizes, found, run, ranks))
        ranks.on_first(lambda: adapted_output.write(self.opened, self.out, run, entry, verify, self.progress))
        return AdaptReport(str(self.out), entry.losses, entry.model_dump())

    def _refit(
        self, module: nn.Module, original: Path | None, rows: Dataset, sizes: settings_of.Schedule,
        measured: Callable[[Model], float],
    ) -> None:  # fmt: skip
        """Fit the linear layers of the student to the original's, on the rows that training begins with."""
        if original is None:
            raise RewriterError(
                f"--refit {self.options.refit}: the weights were trained since the rewrite, so they are no longer the "
                "original's. Give that as --teacher"
            )
        ranks, size = self.ranks, sizes.micro_batch
        group = None if ranks.world == 1 else dist.group.WORLD
        found = {"before": measured(HuggingFaceModel(module, group))}
        theirs = teachers.frozen(teachers.load_model(original, self.device))
        found["original"] = measured(HuggingFaceModel(theirs, group))
        wanted = -(-self.options.refit // len(rows[0]["input_ids"]))
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.data_seed)).tolist()[:wanted]  # type: ignore[arg-type]
        own = order[ranks.replica :: ranks.replicas] or order[:1]
        batches = [stack([rows[i] for i in own[at : at + size]]) for at in range(0, len(own), size)]
        batches = [{name: value.to(self.device) for name, value in batch.items()} for batch in batches]
        refit(module, theirs, batches, ranks, self.progress)
        found["refitted"] = measured(HuggingFaceModel(module, group))
        ranks.on_first(lambda: self.job.remember(**found))

    def _write_source(self, source: Path) -> None:
        if source.exists():
            return
        partial = source.with_name("source.partial")
        shutil.rmtree(partial, ignore_errors=True)
        write_source(self.opened, partial)
        if self.options.from_scratch:
            student_setup.random_weights(partial, self.seed)
        partial.rename(source)

    def _original(self, source: Path, teacher: Any) -> Path | None:
        """The directory of the original model; None where it is not known, or nothing to compare with."""
        if self.options.from_scratch:
            return None
        if teacher is None:
            return source if self.opened.manifest.adaptation is None else None
        place = Path(teacher)
        config = (
            json.loads((place / "config.json").read_text(encoding="utf-8")) if (place / "config.json").is_file() else {}
        )
        expected = source_config(self.opened)
        for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers"):
            if config.get(name) != expected.get(name):
                raise RewriterError(
                    f"--teacher {place}: its {name} is {config.get(name)!r}, that of the rewritten model "
                    f"{expected.get(name)!r}. Give the model that was rewritten"
                )
        return place

    def _check_packing(self, built: student_setup.Student) -> None:
        if self.options.packing and not self.options.sharded and not isolates_segments(built.model.module):
            raise RewriterError(
                f"{self.opened.manifest.source.model_type}: in transformers, tokens of a packed row see those of other "
                "examples. Train with --no-packing, which pads every example to a row of its own"
            )

    def _trainer(
        self, built: student_setup.Student, theirs: Model | None, rows: Dataset, sizes: settings_of.Schedule,
        length: int,
        step: int, evaluation: Callable[[], dict[str, float]],
    ) -> AdaptTrainer:  # fmt: skip
        run, ranks, options = self.run, self.ranks, self.options
        order = Order(len(rows), sizes, ranks, self.data_seed)  # type: ignore[arg-type]
        metrics = Metrics(run, sizes.batch * length, self.progress) if ranks.first else None
        callbacks: list[Any] = [] if metrics is None else [metrics, *tensorboard(run, step)]
        if built.annealed:
            layers = tuple(annealed_layers(built.model.module))
            callbacks.append(
                AnnealingCallback(built.model.module, Annealing(options.anneal, layers, options.anneal_order))
            )
        trainer = AdaptTrainer(
            built.model,
            loss_of(options, theirs, self.device, self.bf16),
            self._arguments(sizes),
            rows,
            order,
            ranks,
            own=built.own,
            clip=built.clip,
            optimizer=built.make_optimizer,
            evaluation=evaluation,
            callbacks=callbacks,
        )
        if metrics is not None:
            metrics.trainer = trainer
        return trainer

    def _arguments(self, sizes: settings_of.Schedule) -> TrainingArguments:
        chosen = {k: v for k, v in self.settings.items() if k not in ("num_train_epochs", "data_seed")}
        chosen |= {
            "max_steps": sizes.steps,
            "per_device_train_batch_size": sizes.micro_batch,
            "gradient_accumulation_steps": sizes.accumulation,
            "save_steps": self.settings.get("save_steps", max(1, min(500, sizes.steps // 4))),
            "eval_strategy": "steps" if "eval_steps" in self.settings else "no",
        }
        try:
            with alone():
                arguments = TrainingArguments(
                    output_dir=str(self.run),
                    report_to="none",
                    disable_tqdm=True,
                    remove_unused_columns=False,
                    logging_nan_inf_filter=False,
                    **chosen,
                )
        except (TypeError, ValueError) as error:
            raise RewriterError(f"--set: {' '.join(str(error).split()):.300}") from error
        return on_device(arguments, self.device)


def _public(name: Any) -> str:
    """How data are named in what is published: a hub id, or the bare name of a file."""
    return Path(name).name if Path(name).exists() else os.fspath(name)


def _identity(source: str) -> str:
    path = Path(source)
    if not path.is_file():
        return source
    with path.open("rb") as file:
        return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}"


def _counts(rows: Rows) -> dict[str, int]:
    counts: Counts = rows.counts
    return asdict(counts)
