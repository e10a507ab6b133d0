"""The training loop: transformers' Trainer, for a model that is distributed by itself.

Every rank's Trainer believes that it is alone: there is no DDP, and accelerate shards nothing. `Order` assigns rows to
ranks, the model or its optimizer sums gradients, and all ranks write checkpoints together. Logging, schedules,
accumulation, mixed precision and the loop itself are the Trainer's.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, Sampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from rewriter.adapt import checkpoints
from rewriter.adapt.models import Batch, Model
from rewriter.adapt.objective import Loss, stack
from rewriter.adapt.prompts import PromptRows
from rewriter.adapt.ranks import RunRanks
from rewriter.adapt.schedule import RunSizes
from rewriter.adapt.students import Run, Student
from rewriter.common.errors import RewriterError
from rewriter.runtime.replicas import IGNORED, next_tokens
from rewriter.training import ZeroOptimizer

METRICS = "metrics.jsonl"
_KEPT = ("loss", "grad_norm", "learning_rate", "eval_loss")


class Metrics(TrainerCallback):
    """Writes what is logged to `metrics.jsonl`; on rank 0 alone.

    A line has the step, the tokens seen until then, and what the Trainer logs, with the loss of the step, its parts and
    the tokens per second since the line before; `parts` gives those of the last step. When a run is resumed, lines
    after the checkpoint are dropped.
    """

    def __init__(self, run: Run, parts: Callable[[], Mapping[str, float]]) -> None:
        self.run, self.parts, self.path = run, parts, run.place / METRICS
        self.tokens_per_step = run.sizes.batch * run.data.length
        self._last = (0, 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else []
        kept = [line for line in lines if _step(line) <= state.global_step]
        self.path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self._last = (state.global_step, time.perf_counter())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        logged = {name: value for name, value in (logs or {}).items() if name in _KEPT}
        if not logged:
            return
        if "loss" in logged:
            # of the step, not the Trainer's mean since the last line: that is another one after an interruption
            logged |= self.parts()
            now, (step, then) = time.perf_counter(), self._last
            if state.global_step > step:
                logged["tokens_per_second"] = round((state.global_step - step) * self.tokens_per_step / (now - then), 1)
                self._last = (state.global_step, now)
            speed = logged.get("tokens_per_second")
            self.run.context.progress(
                "training", state.global_step, state.max_steps, loss=logged["loss"], tokens_per_second=speed
            )
        entry: dict[str, Any] = {"step": state.global_step, "tokens": state.global_step * self.tokens_per_step}
        entry |= {name: value if math.isfinite(value) else str(value) for name, value in logged.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, in order."""
    return [json.loads(line) for line in (run / METRICS).read_text(encoding="utf-8").splitlines()]


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # the line that was being written when the run was killed


def tensorboard(run: Path, step: int) -> list[TrainerCallback]:
    """The Trainer's callback for TensorBoard, which writes below the run's directory; none where it is missing.

    A run that goes on after `step` hides what was written past it before.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return []
    from transformers.integrations import TensorBoardCallback

    _next_second(run / "tensorboard")
    return [TensorBoardCallback(SummaryWriter(str(run / "tensorboard"), purge_step=step + 1))]


def _next_second(folder: Path) -> None:
    """Wait until a new file of events would be named after another second than the newest one. TensorBoard reads files
    in the order of their names, which have the second and then the process: of one second, the resumed run could come
    first, and the earlier run's events would then purge its own."""
    begun = [int(file.name.split(".")[3]) for file in folder.glob("events.out.tfevents.*")]
    wait = max(begun, default=0) + 1 - time.time()
    if 0 < wait <= 1:
        time.sleep(wait)


_PLACE = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


class Order(Sampler[list[int]]):
    """The rows of every backward pass of a rank, in order: lists of `schedule.micro_batch` indices.

    Epochs follow one another, each another permutation of all rows; step g takes the next `schedule.batch` rows, and
    ranks take neighbouring parts of them. It depends on the seed and the rows alone: a step sees the same rows on any
    number of ranks, and after any interruption.
    """

    def __init__(self, rows: int, schedule: RunSizes, ranks: RunRanks, seed: int) -> None:
        self.rows, self.schedule, self.ranks, self.seed = rows, schedule, ranks, seed

    def __len__(self) -> int:
        return self.schedule.steps * self.schedule.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        stream, size = self._stream(), self.schedule.micro_batch
        own = self.schedule.accumulation * size
        first = self.ranks.replica * own
        for _ in range(self.schedule.steps):
            step = [next(stream) for _ in range(self.schedule.batch)]
            yield from (step[i : i + size] for i in range(first, first + own, size))

    def _stream(self) -> Iterator[int]:
        epoch = 0
        while True:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            yield from torch.randperm(self.rows, generator=generator).tolist()
            epoch += 1


class PromptOrder(Order):
    """The same order of rows that have another prompt in every epoch: row i of epoch e is number e · rows + i."""

    def _stream(self) -> Iterator[int]:
        for place, row in enumerate(super()._stream()):
            yield place // self.rows * self.rows + row


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hide from accelerate that there are other ranks."""
    kept = {name: value for name, value in os.environ.items() if name not in _PLACE}
    with mock.patch.dict(os.environ, kept, clear=True):
        yield


def on_device(arguments: TrainingArguments, device: torch.device) -> TrainingArguments:
    """`arguments` for this rank's device alone: a Trainer that believes it is alone would take the machine's first GPU,
    and split its batches over all that there are.

    The device is a private property of TrainingArguments, whose value is cached where it can be replaced.
    """
    if arguments.device.type == "cuda":
        arguments.__dict__["_setup_devices"], arguments._n_gpu = device, 1
        torch.cuda.set_device(device)
    return arguments


def training_arguments(run: Run) -> TrainingArguments:
    """The Trainer's arguments. Raises RewriterError for values that it refuses."""
    sizes = run.sizes
    chosen = {k: v for k, v in run.settings.items() if k not in ("num_train_epochs", "data_seed")}
    chosen |= {
        "max_steps": sizes.steps,
        "per_device_train_batch_size": sizes.micro_batch,
        "gradient_accumulation_steps": sizes.accumulation,
        "save_steps": run.settings.get("save_steps", max(1, min(500, sizes.steps // 4))),
        "eval_strategy": "steps" if "eval_steps" in run.settings else "no",
        "use_cpu": run.device.type == "cpu",  # without a GPU, bf16 is refused where that is not said
    }
    try:
        with alone():
            arguments = TrainingArguments(
                output_dir=str(run.place),
                report_to="none",
                disable_tqdm=True,
                remove_unused_columns=False,
                logging_nan_inf_filter=False,
                **chosen,
            )
    except (TypeError, ValueError) as error:
        raise RewriterError(f"--set: {' '.join(str(error).split()):.300}") from error
    return on_device(arguments, run.device)


class AdaptTrainer(Trainer):
    """Trains `built` by `loss`, on the rows of the run. `judged` is what computes the rows to evaluate on.

    Raises RewriterError when a loss or gradient is not finite, naming the step and the last good checkpoint.
    """

    def __init__(
        self, run: Run, built: Student, loss: Loss, callbacks: list[TrainerCallback], judged: Model | None = None
    ) -> None:
        rows = run.data.rows
        with alone():
            # rows to evaluate on are asked for where eval_steps is set, and are never read: `evaluate` has its own
            super().__init__(built.model.module, training_arguments(run), stack, rows, rows, callbacks=callbacks)
        self.run, self.built, self.student, self.loss, self.ranks = run, built, built.model, loss, run.ranks
        self.judged = judged or built.model
        self.remove_callback(PrinterCallback)  # Metrics prints instead
        if run.ranks.first:
            self.add_callback(Metrics(self.run, lambda: self.parts))
        self.parts: dict[str, float] = {}
        self._targets = 1
        self._sums: dict[str, Tensor] = {}

    # Data

    def get_train_dataloader(self) -> DataLoader[Any]:
        run, args = self.run, self.args
        seed = int(run.settings.get("data_seed", run.settings["seed"]))
        kind = PromptOrder if isinstance(run.data.rows, PromptRows) else Order
        order = kind(len(run.data.rows), run.sizes, self.ranks, seed)  # type: ignore[arg-type]
        pin = args.dataloader_pin_memory and args.device.type == "cuda"
        return DataLoader(
            run.data.rows, batch_sampler=order, collate_fn=stack, num_workers=args.dataloader_num_workers,
            pin_memory=pin,
        )  # fmt: skip

    def _get_num_items_in_batch(self, batch_samples: list[Batch], device: torch.device) -> int:
        own = sum(int((next_tokens(batch["labels"]) != IGNORED).sum()) for batch in batch_samples)
        total = self.ranks.sum(torch.tensor(own, device=device, dtype=torch.float64)) / self.ranks.within
        self._targets = max(1, int(total))
        self._sums = {}
        return self._targets

    # A step

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        last = self.accelerator.sync_gradients
        if isinstance(self.student.module, FSDPModule):
            self.student.module.set_requires_gradient_sync(last)
        inputs = self._prepare_inputs(inputs)
        optimizer = self._raw()
        put_off = optimizer.no_sync() if isinstance(optimizer, ZeroOptimizer) and not last else None
        with self.compute_loss_context_manager(), put_off or contextlib.nullcontext():
            sums = self.loss(self.student, inputs, model)
            self.accelerator.backward(sums["loss"] * (self.ranks.replicas / self._targets))
        means = torch.stack([value.detach().float() for value in sums.values()]) / self._targets
        if self.student.group is not None:
            self.ranks.sum(means, self.student.group)
        for name, value in zip(sums, means.unbind(), strict=True):
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        return means[list(sums).index("loss")]

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self._clipped(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return self._clipped(math.inf) if grad_norm is None else grad_norm

    def _clipped(self, largest: float) -> Tensor:
        """The norm, before weights are touched: what is not finite now would be in all of them after the step."""
        norm = self.built.clip(largest)
        self.parts = {name: float(value) for name, value in self._sums.items()}
        values = {**{f"the {name}": value for name, value in self.parts.items()}, "the gradient's norm": float(norm)}
        bad = next((name for name, value in values.items() if not math.isfinite(value)), None)
        if bad is None:
            return norm
        kept = checkpoints.last(self.run.place)
        where = "there is no checkpoint yet" if kept is None else f"the last good checkpoint is {kept}"
        raise RewriterError(
            f"step {self.state.global_step + 1}: {bad} is {values[bad]}; training stopped before the weights took it "
            f"up, and {where}. Lower learning_rate or max_grad_norm and start again, or look at the rows of this step"
        )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's optimizer, or one like it of master weights, where the student has some."""
        plain = super().create_optimizer(model) if model is not None else super().create_optimizer()
        wrap = self.built.master_weights
        if wrap is not None and self.built.optimizer is None:
            cls, keywords = self.get_optimizer_cls_and_kwargs(self.args, self.built.model.module)
            groups = [{name: group[name] for name in ("params", "weight_decay")} for group in plain.param_groups]
            self.optimizer = self.built.optimizer = wrap(lambda own: cls(own, **keywords), groups)
        return self.optimizer

    def _raw(self) -> torch.optim.Optimizer:
        """The optimizer within accelerate's."""
        optimizer: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return optimizer

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The losses on the evaluation rows, logged."""
        measured = {"eval_loss": self.run.measured(self.judged)}
        self.log(measured)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, measured)
        return measured

    # Checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        step = self.state.global_step
        with checkpoints.writing(self.run.place, step, self.args.save_total_limit, self.ranks) as place:
            checkpoints.save(place, self.student.module, self._raw(), self.lr_scheduler, self.ranks, self.built.own)
            if self.ranks.first:
                self.state.save_to_json(str(place / "trainer_state.json"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        checkpoints.load_model(Path(resume_from_checkpoint), self.student.module, self.ranks, self.built.own)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            module, schedule = self.student.module, self.lr_scheduler
            checkpoints.load_rest(Path(checkpoint), module, self._raw(), schedule, self.ranks, self.built.own)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            checkpoints.load_random_state(Path(checkpoint), self.ranks)
