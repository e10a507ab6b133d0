"""Student and teacher of a run, on any number of ranks."""

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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, Trainer, set_seed

from rewriter.adapt import teacher as teachers
from rewriter.adapt.isolation import isolates_segments
from rewriter.adapt.norms import clip_gradients
from rewriter.adapt.options import Options
from rewriter.adapt.run import Run
from rewriter.adapt.students import HuggingFaceModel, Model, ShardedModel, base_of
from rewriter.adapt.trunk import Trunk, freeze_unchanged, share_frozen, trunk_of
from rewriter.adapt.unshard import shares, write_model
from rewriter.common.errors import RewriterError
from rewriter.convert.conversion import save
from rewriter.convert.rewritten_source import Opened, original_program, rewritten, write_source
from rewriter.ir import Program
from rewriter.runtime.loading.load import load as load_sharded
from rewriter.runtime.module import RuntimeModel
from rewriter.tracing.meta_model import find_layers, load_config
from rewriter.training import (
    ExpertParallel,
    NodeLocalOptimizer,
    ZeroOptimizer,
    expert_mesh,
    node_local_optimizer,
    node_mesh,
    quantize_frozen,
    shard_experts,
    shard_parameters,
    zero_optimizer,
    zero_plus_plus,
)
from rewriter.training.zero.master_weights import MakeOptimizer
from rewriter.weights import Checkpoint

PLUS_PLUS: Mapping[str, Any] = {"weights": "int8", "gradients": "int8/int4-hadamard"}
"""What `--zero plus-plus` quantizes (ZeRO++, arXiv 2306.10209): gathered weights, and gradients in two hops."""


@dataclass
class Student:
    """What a run trains.

    own: this rank's number among those that hold other parameters under the same names (tensor- or expert-parallel
    ranks). program: of a sharded module. exact: loads the model as it was before its base was quantized, with new
    adapters, on the CPU. optimizer: one of master weights, once it is made. mesh: what FSDP2 shards over.
    """

    model: Model
    own: int = 0
    program: Program | None = None
    make_optimizer: Callable[[Trainer], torch.optim.Optimizer] | None = None
    optimizer: ZeroOptimizer | NodeLocalOptimizer | None = None
    experts: ExpertParallel | None = None
    exact: Callable[[], nn.Module] | None = None
    mesh: DeviceMesh | None = None

    def clip(self, largest: float) -> Tensor:
        """Complete the gradients of a step and scale them to a norm of at most `largest` over all ranks; the norm."""
        if self.experts is not None:
            self.experts.reduce_gradients()
            return self.experts.clip_grad_norm_(largest)
        if self.optimizer is not None:
            return self.optimizer.clip_grad_norm_(largest)
        module = self.model.module
        if self.program is None:
            return clip_gradients(module, largest)
        return clip_gradients(module, largest, self._shares, cast("ProcessGroup | None", module.tp))

    @cached_property
    def _shares(self) -> dict[str, float | Tensor]:
        """By parameter, how much of an element is this rank's: the same in every step."""
        assert self.program is not None
        ranks = self.program.mesh.get("tp", 1)
        return {name: shares(p, self.own, ranks) for name, p in self.program.parameters.items()}


def prepare_source(run: Run) -> None:
    """Write the original over the directory's weights to `run.source`, or over random ones, unless it is there."""
    if run.source.exists():
        return
    partial = run.source.with_name("source.partial")
    shutil.rmtree(partial, ignore_errors=True)
    write_source(run.opened, partial)
    if run.options.from_scratch:
        _random_weights(partial, int(run.settings["seed"]))
    partial.rename(run.source)


def _random_weights(source: Path, seed: int) -> None:
    """Replace the weights in `source` by those that its architecture starts training from."""
    like = Checkpoint.open(source)
    set_seed(seed)
    model = AutoModelForCausalLM.from_config(load_config(source), dtype=torch.float32)
    write_model(model, model.state_dict(), like, source / "fresh", source)


def student(run: Run) -> Student:
    """The model to train, from the weights in `run.source`. Every rank calls it.

    Raises RewriterError for options that the directory or the ranks cannot serve.
    """
    options = run.options
    if options.sharded:
        program = rewritten(run.opened, run.source, tp=options.tp, sp=options.sp)
        sharded = _runtime(run, program, "student")
        if options.zero == "3":
            shard_parameters(sharded, param_dtype=torch.bfloat16 if run.bf16 else None)
        return Student(ShardedModel(sharded), run.ranks.rank % options.tp, program)
    built = _hugging_face_student(run)
    if options.packing and not isolates_segments(built.model.module):
        raise RewriterError(
            f"{run.opened.manifest.source.model_type}: in transformers, tokens of a packed row see those of other "
            "examples. Train with --no-packing, which pads every example to a row of its own"
        )
    return built


def _runtime(run: Run, program: Program, name: str) -> RuntimeModel:
    place = run.place / name
    run.ranks.on_first(lambda: None if place.exists() else save(program, place, verify="none"))
    module = load_sharded(place, dp=run.ranks.replicas, device=run.device, dtype=torch.float32)
    assert isinstance(module, RuntimeModel)
    return module


def _hugging_face_student(run: Run) -> Student:
    opened, options, ranks = run.opened, run.options, run.ranks
    place, remote = run.place / "student", opened.manifest.adapted.modeling is not None
    ranks.on_first(lambda: _write_student(run, place))
    module = teachers.load_model(place, run.device, remote)
    if options.train == "rewritten":
        freeze_unchanged(module)
    if options.lora:
        module = _with_adapters(module, options.lora, opened)
    built = Student(HuggingFaceModel(module, ranks.group))
    if options.base is not None:
        quantize_frozen(module, options.base)
        cpu = torch.device("cpu")
        built.exact = lambda: _with_adapters(teachers.load_model(place, cpu, remote), options.lora, opened)
    if ranks.world > 1:
        _distribute(run, built)
    return built


def _distribute(run: Run, built: Student) -> None:
    """Shard experts, weights or the optimizer of a Hugging Face model over data-parallel ranks."""
    options, ranks, kind = run.options, run.ranks, run.device.type
    module, zero = built.model.module, options.zero or "1"
    if options.ep > 1:
        mesh = expert_mesh(ranks.world // options.ep, options.ep, options.ep_order, kind)
        built.experts, built.own = shard_experts(base_of(module), mesh), mesh.get_local_rank("ep")
        return
    if not options.fully_sharded:
        built.make_optimizer = _maker(
            built, lambda make, groups: zero_optimizer(module, make, ranks.group, stage=int(zero), params=groups)
        )
        return
    nodes = node_mesh(kind) if zero == "node-local" else None
    built.mesh = ranks.mesh(run.device) if nodes is None else nodes["local"]
    _fully_shard(module, built.mesh, run.bf16)
    if zero == "plus-plus":
        zero_plus_plus(module, **PLUS_PLUS)
    elif nodes is not None:
        built.make_optimizer = _maker(
            built, lambda make, groups: node_local_optimizer(module, nodes, make, params=groups)
        )


def _maker(
    built: Student, wrap: Callable[[MakeOptimizer, list[dict[str, Any]]], ZeroOptimizer | NodeLocalOptimizer]
) -> Callable[[Trainer], torch.optim.Optimizer]:
    """What makes the optimizer that the trainer's arguments describe, of the master weights that `wrap` makes."""

    def make(trainer: Trainer) -> torch.optim.Optimizer:
        module = built.model.module
        cls, keywords = Trainer.get_optimizer_cls_and_kwargs(trainer.args, module)
        decayed = set(trainer.get_decay_parameter_names(module))
        groups: list[dict[str, Any]] = []
        for decays in (True, False):
            chosen = [p for n, p in module.named_parameters() if p.requires_grad and (n in decayed) == decays]
            if chosen:
                groups.append({"params": chosen, "weight_decay": trainer.args.weight_decay if decays else 0.0})
        built.optimizer = wrap(lambda given: cls(given, **keywords), groups)
        return built.optimizer

    return make


def _write_student(run: Run, place: Path) -> None:
    """The student as a Hugging Face directory over the weights in `run.source`, unless an earlier run wrote it."""
    if place.exists():
        return
    partial = place.with_name(f"{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for file in [*run.opened.root.glob("*.py"), run.opened.root / "config.json"]:
        (partial / file.name).write_bytes(file.read_bytes())
    for file in run.source.iterdir():
        if not (partial / file.name).exists() and file.is_file():
            (partial / file.name).symlink_to(file.resolve())
    partial.rename(place)


def _with_adapters(module: nn.Module, rank: int, opened: Opened) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    try:
        return get_peft_model(module, config)
    except ValueError as error:
        raise RewriterError(f"--lora {rank}: {opened.root}: {' '.join(str(error).split()):.300}") from error


def _fully_shard(module: nn.Module, mesh: DeviceMesh | None, bf16: bool) -> None:
    _, layers = find_layers(base_of(module))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
    for part in [*layers, module]:
        fully_shard(part, mesh=mesh, mp_policy=policy)


def teacher(built: Student, run: Run, original: Path) -> Model:
    """The model in `original`, frozen, on the student's ranks. With adapters it reads the student's own weights."""
    options, group = run.options, built.model.group
    if options.sharded:
        module = _runtime(run, original_program(original, tp=options.tp, sp=options.sp), "teacher")
        module.requires_grad_(False)
        return ShardedModel(module)
    if options.lora and options.base is None and options.ep == 1 and not options.fully_sharded:
        return HuggingFaceModel(teachers.sharing(built.model.module, original, run.device), group)
    whole = teachers.frozen(teachers.load_model(original, run.device))
    if built.experts is not None:
        shard_experts(whole, built.experts.mesh)
    elif built.mesh is not None:
        _fully_shard(whole, built.mesh, False)
    elif options.train == "rewritten":
        share_frozen(built.model.module, whole)
    return HuggingFaceModel(whole, group)


def trunk(built: Student, theirs: Model | None, run: Run) -> Trunk | None:
    """The layers that student and teacher compute alike, to be computed once; None where noise or sharding is in the
    way, or nothing is alike."""
    noisy = bool(run.settings.get("neftune_noise_alpha"))
    if theirs is None or run.options.train != "rewritten" or built.mesh is not None or noisy:
        return None
    return trunk_of(built.model.module, theirs.module)


def require_serves(opened: Opened, options: Options) -> None:
    """Refuse ranks that the directory cannot be trained on."""
    if opened.bound and options.ep > 1:
        raise RewriterError(
            f"{opened.root} is bound to tp={opened.tensor_parallel}, and its file computes all ranks, so "
            f"--ep {options.ep} cannot shard its experts. Use --tp {opened.tensor_parallel}"
        )
    if opened.bound and options.tp not in (1, opened.tensor_parallel):
        raise RewriterError(
            f"{opened.root} is bound to tp={opened.tensor_parallel}, so it cannot be trained with --tp {options.tp}. "
            f"Use --tp {opened.tensor_parallel}, or --tp 1, which computes all ranks on one device"
        )
    if opened.bound and options.sp > 1 and options.tp == 1:
        raise RewriterError(
            f"{opened.root} is bound to tp={opened.tensor_parallel}: --sp {options.sp} alone would compute another "
            f"function. Give --tp {opened.tensor_parallel} too"
        )
