"""Student and teacher of a run: built, sharded over ranks, and the norm of the student's gradients."""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import set_seed

from rewriter.adapt.data_set import RunData
from rewriter.adapt.models import (
    HuggingFaceModel,
    Model,
    ShardedModel,
    base_of,
    carries_state,
    freeze_towers,
    freeze_unchanged,
    frozen,
    isolates_segments,
    load_model,
    share_frozen,
)
from rewriter.adapt.objective import evaluate
from rewriter.adapt.options import AdaptOptions
from rewriter.adapt.padded import mask_gradients, mask_sharded, masks_of_module, masks_of_program
from rewriter.adapt.ranks import RunRanks
from rewriter.adapt.schedule import RunSizes
from rewriter.adapt.unshard import write_model
from rewriter.common.errors import RewriterError
from rewriter.common.files import read_json, refuse_adapter
from rewriter.common.model_class import auto_class
from rewriter.common.run_context import RunContext
from rewriter.common.text_settings import text_settings
from rewriter.convert.conversion import save
from rewriter.convert.rewritten_source import Opened, original_program, rewritten, source_config, write_source
from rewriter.convert.save_options import SaveOptions
from rewriter.ir import Parameter, Program
from rewriter.output.manifest import Padding
from rewriter.runtime.loading import load as load_sharded
from rewriter.runtime.module import RuntimeModel
from rewriter.tracing.meta_model import find_layers, load_config
from rewriter.tracing.parameters import beside_text
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


@dataclass(frozen=True)
class Run:
    """One call of `adapt` on one rank.

    settings: the Trainer's, from which `sizes` follow. place: the directory of the run while it goes on. original: the
    directory of the original model, None where it is not known.
    """

    opened: Opened
    options: AdaptOptions
    settings: Mapping[str, Any]
    data: RunData
    sizes: RunSizes
    ranks: RunRanks
    device: torch.device
    place: Path
    original: Path | None
    context: RunContext

    @property
    def source(self) -> Path:
        """The original model over the weights that training begins with."""
        return self.place / "source"

    @property
    def padding(self) -> Padding | None:
        """The padding in the weights, which is not trained; a model that starts at random has none."""
        return None if self.options.from_scratch else self.opened.manifest.padding

    @property
    def bf16(self) -> bool:
        return bool(self.settings.get("bf16"))

    def autocast(self) -> AbstractContextManager[None]:
        """The precision of a forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def measured(self, model: Model) -> float:
        """The loss on the rows that are not trained on. Raises RewriterError where it is not finite."""
        batch = int(self.settings.get("per_device_eval_batch_size", self.sizes.micro_batch))
        loss = evaluate(model, self.data.held_out, batch, self.ranks, self.device, self.autocast)
        if not math.isfinite(loss):
            raise RewriterError(
                f"the loss on the evaluation rows is {loss}, although the weights were: the model computes beyond "
                "the range of its dtype. Leave out --set bf16 or fp16, or lower the learning rate"
            )
        return loss


def original_directory(opened: Opened, options: AdaptOptions, source: Path, teacher: Any) -> Path | None:
    """The directory of the original model; None where it is not known, or nothing to compare with.

    `source` will have the weights to train under the original wiring. Raises RewriterError where `teacher` is another
    model than the one that was rewritten, and where weights to distil from are no longer the original's.
    """
    if options.from_scratch:
        return None
    if teacher is None:
        if opened.manifest.adaptation is None:
            return source
        if options.method == "distill":
            raise RewriterError(
                f"{opened.root} has been trained since it was rewritten, so its weights are no longer the original's. "
                "Give the original model as --teacher"
            )
        return None
    place = Path(teacher)
    refuse_adapter(place)
    config = {}
    if (place / "config.json").is_file():
        config = read_json(place / "config.json", "Give the original model as --teacher.")
    theirs, ours = text_settings(config), text_settings(source_config(opened))
    padded = "what `rewrite ORIGINAL --recipe fit-tp` makes of it for these ranks"
    model = "the model that was rewritten" if opened.manifest.padding is None else padded
    for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers"):
        if theirs.get(name) != ours.get(name):
            raise RewriterError(
                f"--teacher {place}: its {name} is {theirs.get(name)!r}, that of the rewritten model "
                f"{ours.get(name)!r}. Give {model}"
            )
    return place


PLUS_PLUS: Mapping[str, Any] = {"weights": "int8", "gradients": "int8/int4-hadamard"}
"""Formats of `--zero plus-plus` (ZeRO++, arXiv 2306.10209): of gathered weights, and of gradients in two hops."""


@dataclass
class Student:
    """The model that a run trains, and what goes with it.

    own: this rank's number among those that hold other parameters under the same names (tensor- or expert-parallel
    ranks). program: of a sharded module. exact: loads the model as it was before its base was quantized, with new
    adapters, on the CPU. master_weights: makes an optimizer of them from parameter groups, which is `optimizer` once it
    is made. mesh: what FSDP2 shards over. padded: what it shards of parameters with padding, which is not trained.
    """

    model: Model
    own: int = 0
    program: Program | None = None
    master_weights: Callable[[MakeOptimizer, list[dict[str, Any]]], ZeroOptimizer | NodeLocalOptimizer] | None = None
    optimizer: ZeroOptimizer | NodeLocalOptimizer | None = None
    experts: ExpertParallel | None = None
    exact: Callable[[], nn.Module] | None = None
    mesh: DeviceMesh | None = None
    padded: Sequence[tuple[nn.Parameter, Mapping[int, Tensor]]] = ()

    def clip(self, largest: float) -> Tensor:
        """Complete the gradients of a step and scale them to a norm of at most `largest` over all ranks; the norm."""
        mask_sharded(self.padded)
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
        """`shares` by name of a parameter: the same in every step."""
        assert self.program is not None
        ranks = self.program.mesh.get("tp", 1)
        return {name: shares(p, self.own, ranks) for name, p in self.program.parameters.items()}


def prepare_source(run: Run) -> None:
    """Write the original over the directory's weights to `run.source`, or over those that its architecture starts
    training from, unless it is there."""
    if run.source.exists():
        return
    partial = run.source.with_name("source.partial")
    shutil.rmtree(partial, ignore_errors=True)
    write_source(run.opened, partial)
    if run.options.from_scratch:
        like = Checkpoint.open(partial)
        set_seed(int(run.settings["seed"]))
        config = load_config(partial)
        model = auto_class(config).from_config(config, dtype=torch.float32)
        write_model(model, model.state_dict(), like, partial / "fresh", partial)
    partial.rename(run.source)


def student(run: Run) -> Student:
    """The model to train, from the weights in `run.source`. Every rank calls it.

    Raises RewriterError for options that the directory or the ranks cannot serve.
    """
    options = run.options
    if options.sharded:
        program = rewritten(run.opened, run.source, tp=options.tp, sp=options.sp)
        sharded = _runtime(run, program, "student")
        if options.packing and carries_state(sharded):
            raise _not_packed(run, "a state goes from one example of a packed row to the next")
        if options.zero == "3":
            shard_parameters(sharded, param_dtype=torch.bfloat16 if run.bf16 else None)
        own = run.ranks.rank % options.tp
        masks = {} if run.padding is None else masks_of_program(run.padding, run.source, program, own)
        return Student(ShardedModel(sharded), own, program, padded=mask_gradients(sharded, masks))
    built = _hugging_face_student(run)
    if options.packing and not isolates_segments(built.model.module):
        raise _not_packed(
            run, "in transformers, tokens of a packed row see those of other examples, or the state that these leave"
        )
    return built


def _not_packed(run: Run, why: str) -> RewriterError:
    return RewriterError(
        f"{run.opened.manifest.source.model_type}: {why}. Train with --no-packing, which pads every example to a row "
        "of its own"
    )


def _runtime(run: Run, program: Program, name: str) -> RuntimeModel:
    place = run.place / name
    run.ranks.on_first(lambda: None if place.exists() else save(program, place, options=SaveOptions(verify="none")))
    module = load_sharded(place, dp=run.ranks.replicas, device=run.device, dtype=torch.float32)
    assert isinstance(module, RuntimeModel)
    return module


def _hugging_face_student(run: Run) -> Student:
    options, place, remote = run.options, run.place / "student", run.opened.manifest.adapted.modeling is not None
    run.ranks.on_first(lambda: _write_student(run, place))
    masks: dict[str, Mapping[int, Tensor]] = {}

    def loaded(device: torch.device) -> nn.Module:
        module = load_model(place, device, remote)
        if run.padding is not None:
            masks.update(masks_of_module(run.padding, run.source, module))
        freeze_towers(module)
        if options.train == "rewritten":
            freeze_unchanged(module)
        return _with_adapters(module, options.lora, run.opened) if options.lora else module

    built = Student(HuggingFaceModel(loaded(run.device), run.ranks.group))
    if options.base is not None:
        quantize_frozen(built.model.module, options.base)
        built.exact = lambda: loaded(torch.device("cpu"))
    if run.ranks.world > 1:
        _distribute(run, built)
    built.padded = mask_gradients(built.model.module, masks)
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
        built.master_weights = lambda make, groups: zero_optimizer(
            module, make, ranks.group, stage=int(zero), params=groups
        )
        return
    nodes = node_mesh(kind) if zero == "node-local" else None
    built.mesh = ranks.mesh(run.device) if nodes is None else nodes["local"]
    _fully_shard(module, built.mesh, run.bf16)
    if zero == "plus-plus":
        zero_plus_plus(module, **PLUS_PLUS)
    elif nodes is not None:
        built.master_weights = lambda make, groups: node_local_optimizer(module, nodes, make, params=groups)


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
    config.exclude_modules = sorted({name.rpartition(".")[0] for name in beside_text(module)}) or None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # which peft reads
            return get_peft_model(module, config)
    except ValueError as error:
        raise RewriterError(f"--lora {rank}: {opened.root}: {' '.join(str(error).split()):.300}") from error


def _fully_shard(module: nn.Module, mesh: DeviceMesh | None, bf16: bool) -> None:
    _, layers = find_layers(base_of(module))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
    for part in [*layers, module]:
        fully_shard(part, mesh=mesh, mp_policy=policy)


def teacher(built: Student, run: Run, original: Path) -> Model:
    """The model in `original`, frozen, on the student's ranks. What is frozen in the student is in memory
    once."""
    options, group = run.options, built.model.group
    if options.sharded:
        module = _runtime(run, original_program(original, tp=options.tp, sp=options.sp), "teacher")
        module.requires_grad_(False)
        return ShardedModel(module)
    whole = frozen(load_model(original, torch.device("cpu")))
    if built.experts is None and built.mesh is None:
        share_frozen(built.model.module, whole)
    whole.to(run.device)
    if built.experts is not None:
        shard_experts(whole, built.experts.mesh)
    elif built.mesh is not None:
        _fully_shard(whole, built.mesh, False)
    return HuggingFaceModel(whole, group)


def require_serves(opened: Opened, options: AdaptOptions) -> None:
    """Refuse ranks that the directory cannot be trained on."""
    tp, bound = opened.tensor_parallel, f"{opened.root} is bound to tp={opened.tensor_parallel}"
    if opened.bound and options.ep > 1:
        raise RewriterError(
            f"{bound}, and its file computes all ranks, so --ep {options.ep} cannot shard its experts. Use --tp {tp}"
        )
    if opened.bound and options.tp not in (1, tp):
        raise RewriterError(
            f"{bound}, so it cannot be trained with --tp {options.tp}. Use --tp {tp}, or --tp 1, which computes all "
            "ranks on one device"
        )
    if opened.bound and options.sp > 1 and options.tp == 1:
        raise RewriterError(f"{bound}: --sp {options.sp} alone would compute another function. Give --tp {tp} too")


# --- the norm of gradients


@torch.no_grad()
def clip_gradients(
    module: nn.Module,
    largest: float,
    shares: Mapping[str, float | Tensor] | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Scale all gradients so that their 2-norm is at most `largest`; returns the norm, fp32, equal on all ranks.

    What FSDP2 has sharded is summed over its mesh. Tensor-parallel ranks (`group`) hold parts of parameters, and copies
    of some elements: `shares` has by name how much of an element is this rank's (1 over its copies), for whole
    parameters, of which FSDP2 shards the first dimension.
    """
    sharded: dict[ProcessGroup, Tensor] = {}
    own: Tensor | None = None
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        share = 1.0 if shares is None else shares.get(name, 1.0)
        if isinstance(gradient, DTensor):
            total = _squares(gradient.to_local(), _local_share(share, gradient))
            where = gradient.device_mesh.get_group()
            sharded[where] = sharded[where] + total if where in sharded else total
        else:
            total = _squares(gradient, share)
            own = total if own is None else own + total
    for where, total in sharded.items():
        dist.all_reduce(total, group=where)
        own = total if own is None else own + total
    if own is None:
        return torch.zeros(())
    if group is not None and group.size() > 1:
        dist.all_reduce(own, group=group)
    norm = own.sqrt()
    nn.utils.clip_grads_with_norm_(module.parameters(), largest, norm, foreach=False)
    return norm


def _squares(gradient: Tensor, share: float | Tensor) -> Tensor:
    squares = gradient.float().square()
    return (squares * share).sum() if isinstance(share, Tensor) else squares.sum() * share


def _local_share(share: float | Tensor, gradient: DTensor) -> float | Tensor:
    """The rows of a share that this rank's rows of a gradient have."""
    if not isinstance(share, Tensor) or share.shape[0] == 1:
        return share
    size, ranks, rank = gradient.shape[0], gradient.device_mesh.size(), gradient.device_mesh.get_local_rank()
    rows = -(-size // ranks)
    return share[min(rank * rows, size) : min((rank + 1) * rows, size)]


def shares(parameter: Parameter, rank: int, ranks: int) -> float | Tensor:
    """This rank's part of an element's contribution to a sum over all ranks: 1 over the number of its copies.

    A number, or where copies differ from element to element a tensor that broadcasts against the rank's parameter.
    """
    if parameter.ranges is None or parameter.dim is None or parameter.full_shape is None:
        return 1.0 / ranks
    held = torch.zeros(parameter.full_shape[parameter.dim])
    for ranges in parameter.ranges:
        for start, stop in ranges:
            held[start:stop] += 1
    own = torch.cat([1.0 / held[start:stop] for start, stop in parameter.ranges[rank]])
    if bool((own == 1).all()):
        return 1.0
    sizes = [1] * len(parameter.full_shape)
    sizes[parameter.dim] = -1
    return own.reshape(sizes)
