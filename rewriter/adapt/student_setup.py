"""Student and teacher of a run, on whatever ranks it has."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, Trainer, set_seed

from rewriter.adapt import teacher as teachers
from rewriter.adapt.norms import clip_gradients
from rewriter.adapt.options import Options
from rewriter.adapt.rewritten_source import Opened, original, rewritten
from rewriter.adapt.run_ranks import Ranks
from rewriter.adapt.students import HuggingFaceModel, Model, ShardedModel, base_of
from rewriter.adapt.trainer import AdaptTrainer
from rewriter.adapt.unshard import shares, write_model
from rewriter.common.errors import RewriterError
from rewriter.convert.conversion import save
from rewriter.ir import Program
from rewriter.runtime.load import load as load_sharded
from rewriter.runtime.module import RuntimeModel
from rewriter.tracing.meta_model import find_layers, load_config
from rewriter.training import shard_parameters, zero_optimizer, zero_plus_plus
from rewriter.training.zero.stages import StagedOptimizer
from rewriter.weights import Checkpoint

PLUS_PLUS: Mapping[str, Any] = {"weights": "int8", "gradients": "int8/int4-hadamard"}
"""What `--zero plus-plus` quantizes (ZeRO++, arXiv 2306.10209): gathered weights, and gradients in two hops."""


@dataclass
class Student:
    """What a run trains. `own` is this rank's number among tensor-parallel ranks, `program` theirs (None for one)."""

    model: Model
    own: int = 0
    program: Program | None = None
    annealed: bool = False
    make_optimizer: Callable[[AdaptTrainer], torch.optim.Optimizer] | None = None
    staged: StagedOptimizer | None = None

    def clip(self, largest: float) -> Tensor:
        """Scale gradients to a norm of at most `largest` over all ranks; returns the norm."""
        if self.staged is not None:
            return self.staged.clip_grad_norm_(largest)
        module = self.model.module
        if self.program is None or not isinstance(module, RuntimeModel) or module_ranks(self.program) == 1:
            return clip_gradients(module, largest)
        return clip_gradients(module, largest, self._shares, cast("ProcessGroup | None", module.tp))

    @cached_property
    def _shares(self) -> dict[str, float | Tensor]:
        """By parameter, how much of an element is this rank's: the same in every step."""
        assert self.program is not None
        ranks = module_ranks(self.program)
        return {name: shares(p, self.own, ranks) for name, p in self.program.parameters.items()}


def module_ranks(program: Program) -> int:
    """The tensor-parallel ranks of a program."""
    return program.mesh.get("tp", 1)


def random_weights(source: Path, seed: int) -> None:
    """Replace the weights in `source` by those that its architecture starts training from."""
    like = Checkpoint.open(source)
    set_seed(seed)
    model = AutoModelForCausalLM.from_config(load_config(source), dtype=torch.float32)
    write_model(model, model.state_dict(), like, source / "fresh", source)


def student(
    opened: Opened, source: Path, run: Path, options: Options, ranks: Ranks, device: torch.device, bf16: bool,
    prepare: Callable[[nn.Module], None] = lambda module: None,
) -> Student:  # fmt: skip
    """The model to train, from the weights in `source`. Every rank calls it. `prepare` is called with the module while
    it is whole, unless ranks share it.

    Raises RewriterError for options that the directory or the ranks cannot serve.
    """
    if options.sharded:
        return _sharded(opened, source, run, options, ranks, device, bf16)
    return _whole(opened, source, run, options, ranks, device, bf16, prepare)


def _sharded(
    opened: Opened, source: Path, run: Path, options: Options, ranks: Ranks, device: torch.device, bf16: bool
) -> Student:
    program = rewritten(opened, source, tp=options.tp, sp=options.sp)
    module = _runtime(program, run / "student", ranks, device)
    if options.zero == "3":
        shard_parameters(module, param_dtype=torch.bfloat16 if bf16 else None)
    return Student(ShardedModel(module), ranks.rank % options.tp, program)


def _runtime(program: Program, place: Path, ranks: Ranks, device: torch.device) -> RuntimeModel:

    def write() -> None:
        if not place.exists():
            save(program, place, verify="none")

    ranks.on_first(write)
    module = load_sharded(place, dp=ranks.replicas, device=device, dtype=torch.float32)
    assert isinstance(module, RuntimeModel)
    return module


def _whole(
    opened: Opened, source: Path, run: Path, options: Options, ranks: Ranks, device: torch.device, bf16: bool,
    prepare: Callable[[nn.Module], None],
) -> Student:  # fmt: skip
    annealed = options.anneal > 0
    place = run / "student"
    ranks.on_first(lambda: _write_student(opened, source, place, annealed))
    module = teachers.load_model(place, device, opened.manifest.adapted.modeling is not None)
    prepare(module)
    if options.lora:
        module = _with_adapters(module, options.lora, opened)
    mesh = ranks.mesh(device)
    built = Student(HuggingFaceModel(module, None if mesh is None else mesh.get_group()), annealed=annealed)
    zero = options.zero or ("1" if ranks.world > 1 else None)
    if mesh is None:
        return built
    if zero in ("1", "2"):
        stage = int(zero)

        def make(trainer: AdaptTrainer) -> torch.optim.Optimizer:
            cls, keywords = Trainer.get_optimizer_cls_and_kwargs(trainer.args, module)
            decayed = set(trainer.get_decay_parameter_names(module))
            groups: list[dict[str, Any]] = []
            for decays in (True, False):
                chosen = [p for n, p in module.named_parameters() if p.requires_grad and (n in decayed) == decays]
                if chosen:
                    groups.append({"params": chosen, "weight_decay": trainer.args.weight_decay if decays else 0.0})
            group = mesh.get_group()
            built.staged = zero_optimizer(
                module, lambda given: cls(given, **keywords), group, stage=stage, params=groups
            )
            return built.staged

        built.make_optimizer = make
    else:
        _fully_shard(module, mesh, bf16)
        if zero == "plus-plus":
            zero_plus_plus(module, **PLUS_PLUS)
    return built


def _write_student(opened: Opened, source: Path, place: Path, annealed: bool) -> None:
    """The student as a Hugging Face directory over the weights in `source`, unless an earlier run wrote it."""
    if place.exists():
        return
    partial = place.with_name(f"{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    if annealed:
        from rewriter.emit.annealed import write_annealed

        write_annealed(rewritten(opened, source), source, partial)
    else:
        partial.mkdir()
        for file in [*opened.root.glob("*.py"), opened.root / "config.json"]:
            (partial / file.name).write_bytes(file.read_bytes())
        for file in source.iterdir():
            if file.name != "config.json" and file.is_file():
                (partial / file.name).symlink_to(file.resolve())
    partial.rename(place)


def _with_adapters(module: nn.Module, rank: int, opened: Opened) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise RewriterError("--lora needs the package peft: pip install peft") from None
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    try:
        return get_peft_model(module, config)
    except ValueError as error:
        raise RewriterError(f"--lora {rank}: {opened.root}: {' '.join(str(error).split()):.300}") from error


def _fully_shard(module: nn.Module, mesh: Any, bf16: bool) -> None:
    _, layers = find_layers(base_of(module))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
    for part in [*layers, module]:
        fully_shard(part, mesh=mesh, mp_policy=policy)


def teacher(built: Student, source: Path, run: Path, options: Options, ranks: Ranks, device: torch.device) -> Model:
    """The original model, frozen, on the ranks of the student. With adapters it reads the student's own weights."""
    if options.sharded:
        program = original(source, tp=options.tp, sp=options.sp)
        module = _runtime(program, run / "teacher", ranks, device)
        module.requires_grad_(False)
        return ShardedModel(module)
    group = built.model.group
    if options.lora and options.zero not in ("3", "plus-plus"):
        return HuggingFaceModel(teachers.sharing(built.model.module, source, device), group)
    whole = teachers.frozen(teachers.load_model(source, device))
    if options.zero in ("3", "plus-plus") and ranks.world > 1:
        _fully_shard(whole, ranks.mesh(device), False)
    return HuggingFaceModel(whole, group)


def require_serves(opened: Opened, options: Options) -> None:
    """Refuse a number of tensor-parallel ranks that the directory cannot be trained on."""
    if opened.bound and options.tp not in (1, opened.tensor_parallel):
        raise RewriterError(
            f"{opened.root} is bound to tp={opened.tensor_parallel}, so it cannot be trained with --tp {options.tp}. "
            f"Use --tp {opened.tensor_parallel}, or --tp 1, which computes the lanes of all ranks on one device"
        )
    if opened.bound and options.sp > 1 and options.tp == 1:
        raise RewriterError(
            f"{opened.root} is bound to tp={opened.tensor_parallel}: --sp {options.sp} alone would compute another "
            f"function. Give --tp {opened.tensor_parallel} too"
        )
