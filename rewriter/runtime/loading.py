"""Loading of this rank's module from an output directory."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.overrides import TorchFunctionMode

from rewriter.common.errors import RewriterError, VerificationError
from rewriter.common.files import check_sha256, read_json
from rewriter.common.processes import CUDNN_ATTENTION_LAST, local_rank
from rewriter.common.text_settings import vocabulary_size
from rewriter.ir.ops import SequencePlan
from rewriter.output.names import MANIFEST
from rewriter.output.runtime_module import ModuleEntry, no_module, read_module_entry
from rewriter.runtime.attention.mesh import sequence_mesh
from rewriter.runtime.collectives.small_sums import connect_small_sums
from rewriter.runtime.compiled import compile_segments
from rewriter.runtime.module import RuntimeModel
from rewriter.runtime.parallel import OffloadedEmbedding
from rewriter.weights.references import RankWeights
from rewriter.weights.stored_weight import StoredWeight
from rewriter.weights.streaming import stream_parameters


def load(
    directory: str | os.PathLike[str],
    *,
    dp: int = 1,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    compile: bool | None = None,
    stream: bool = False,
    keep_quantized: bool = True,
    check: bool = False,
) -> nn.Module:
    """This rank's module of a rewritten model, in eval mode, with its weights on `device`.

    Under torchrun it joins the process group (gloo on CPU, NCCL on CUDA, unless one exists) and builds the mesh that
    the manifest names, `dp` times side by side: copies of the model that see different rows. Its dimensions are "tp"
    (neighbours), before it "dp", and where ranks share the tokens of a sequence those of
    `rewriter.runtime.sequence_mesh`. `device` defaults to this rank's GPU (the only one that the process sees, where
    its launcher shows each its own) if there is one, else the CPU; `dtype` to that of the file. Decode steps on a CPU
    that `rewrite generate` has compiled are used (`rewriter.runtime.generation.step_cache`), but not with
    `compile=False`. With True the segments between collectives are compiled when they are first used.
    `stream` reads weights whenever they are used, which is slow, and runs a model of any size. FP8 and MXFP4 weights
    stay as they are stored and are dequantized where they are used, unless `keep_quantized` is False or segments are
    compiled. Runs the directory's own module.py, so load only what you trust.

    Of files with weights it checks that they are those of this rank and mesh, their sizes and their headers; with
    `check` also their contents, which reads all of them.

    Raises RewriterError if the manifest, the module or the rank's file is missing, unreadable or another than `rewrite`
    wrote, if the number of processes is not dp times the one the files were made for, and if names or shapes in the
    file are not those of the module; VerificationError for contents that changed.
    """
    root = Path(directory)
    made, where, mesh, model = _unfilled(root, dp, device)
    rank = 0 if mesh is None else mesh.get_local_rank("tp")
    keep, weights = keep_quantized and not compile, _weights(made, rank)
    if check:
        _check(made, weights)
    fill(model, weights, device=where, dtype=dtype, stream=stream, keep_quantized=keep)
    model.eval()
    if compile:
        compile_segments(model)
    elif compile is None:
        vars(model)["origin"] = _origin(made, dp)
    connect_small_sums(None if mesh is None else mesh.get_group("tp"), where)
    return model


@dataclass(frozen=True)
class Origin:
    """Source of a model. `code`: the sha256 of its module's file; `dp`: the number of its copies; `compiling`: when
    decode steps are compiled that are not in the cache (`generation.cached_step`)."""

    directory: str
    code: str
    dp: int
    compiling: Literal["never", "background", "first"] = "never"


def skeleton(directory: str | os.PathLike[str], dp: int = 1) -> nn.Module:
    """This rank's module without its weights, for a CPU; `origin` is an attribute of it. Raises as `load`."""
    root = Path(directory)
    made, _, _, model = _unfilled(root, dp, "cpu")
    vars(model)["origin"] = _origin(made, dp)
    return model


def _origin(made: ModuleEntry, dp: int) -> Origin:
    code = hashlib.sha256(made.path(made.module).read_bytes()).hexdigest()
    return Origin(str(made.root.resolve()), code, dp)


def _unfilled(
    root: Path, dp: int, device: torch.device | str | None
) -> tuple[ModuleEntry, torch.device, DeviceMesh | None, nn.Module]:
    """The entry of `root` for this process, its device, the mesh of all processes, and the module with parameters on
    the meta device."""
    if dp < 1:
        raise RewriterError(f"dp={dp}: expected 1 or more copies of the model")
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    made = read_module_entry(root, world // dp)
    plan = _plan(made)
    if world != dp * made.processes:
        raise RewriterError(f"{root}: {_wrong_world(made, dp, world)}")
    where = rank_device(device)
    mesh = _mesh(where, made, plan, dp)
    model = build(made.path(made.module), made.class_name, mesh)
    if isinstance(model, RuntimeModel):
        config = root / "config.json"
        model.vocabulary = vocabulary_size(read_json(config, "Rewrite the model again")) if config.exists() else None
        model.positions = made.positions
    axis = getattr(model, "sequence", None)
    if (own := None if axis is None else axis.plan) != plan:
        raise RewriterError(
            f"{root}: its module shares tokens by {own}, but {MANIFEST} says {plan}. Rewrite the model again"
        )
    return made, where, mesh, model


def _plan(made: ModuleEntry) -> SequencePlan | None:
    """Plan by which ranks share the tokens of a sequence; None where each holds all."""
    if (shared := made.sequence) is None:
        plan = None
    else:
        try:
            quantized, least = shared.get("quantized"), int(shared.get("min_bytes", 0))
            plan = SequencePlan(shared["kind"], tuple(shared["grid"]), bool(shared["overlap"]), quantized, least)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise no_module(made.root, error) from error
    if made.sequence_ranks != (1 if plan is None else plan.ranks):
        raise RewriterError(
            f"{made.root / MANIFEST}: its mesh has sp={made.sequence_ranks}, but its tokens are sharded by {plan}. It "
            "is not as `rewrite` wrote it"
        )
    return plan


def _weights(made: ModuleEntry, rank: int) -> RankWeights:
    if made.weights is not None:
        weights = RankWeights.open(made.root, made.path(made.weights), rank)
        if made.weights in made.files:
            check_sha256(made.root / made.weights, made.files[made.weights])
        return weights
    said = made.headers.get(name := made.ranks[rank])
    header = None if said is None else (int(said["size"]), str(said["header"]))
    return RankWeights.of_file(made.path(name), header, rank=str(rank), mesh=made.name)


def _check(made: ModuleEntry, weights: RankWeights) -> None:
    """Compare the contents of the files that a rank reads with the manifest."""
    for path in weights.checkpoint.files:
        name = path.relative_to(made.root).as_posix()
        if name not in made.files:
            raise VerificationError(f"{made.root}: its manifest does not list {name}, so its content cannot be checked")
        check_sha256(path, made.files[name])


def _wrong_world(made: ModuleEntry, dp: int, world: int) -> str:
    """Text of an error: `world` processes cannot run it, for a reason, and what to do."""
    needed, run = dp * made.processes, f"but {world} run{'s' * (world == 1)}"
    start = f"Start it with torchrun --nproc-per-node {needed}"
    copies = f", pass dp={world // made.processes}" if world % made.processes == 0 else ""
    if made.bound:
        return (
            f"this checkpoint is bound to tp={made.tensor_ranks}, since its ranks leave out all-reduces, {run}. {start}"
            f"{copies}; for another number, rewrite the original model again"
        )
    axes = [f"{axis}={n}" for axis, n in (("dp", dp), ("sp", made.sequence_ranks), ("tp", made.tensor_ranks)) if n > 1]
    product = f" ({' × '.join(axes)})" if len(axes) > 1 else ""
    again = f"--tp {world}" if made.sequence is None else "another --sp or --tp"
    return (
        f"its runtime module is for {needed} rank{'s' * (needed > 1)}{product}, {run}. {start}{copies}, or rewrite "
        f"again with {again}"
    )


def rank_device(device: torch.device | str | None = None) -> torch.device:
    """Device of this rank: `device`, by default its GPU if there is one. A GPU becomes the process's current one.

    Raises RewriterError for a GPU that this process does not see, or a rank without its own one.
    """
    where = torch.device(device) if device is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if where.type == "cuda":
        visible = torch.cuda.device_count()
        if where == torch.device("cuda"):
            where = torch.device("cuda", _own_gpu(visible))
        elif where.index >= visible:
            raise RewriterError(f"device {where}: this process sees {_gpus(visible)}. Choose another, or device='cpu'")
        torch.cuda.set_device(where)
        os.environ.setdefault(*CUDNN_ATTENTION_LAST)  # for ranks that torchrun started
    return where


def _own_gpu(visible: int) -> int:
    """Number of this rank's GPU: its own, or that of the only one where a launcher (SLURM) shows each process one."""
    number = local_rank()
    if number < visible:
        return number
    if visible == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
        return 0  # if it is other ranks' too, NCCL refuses
    alone = ", or device='cuda:0' if each process sees a GPU of its own" if visible == 1 else ""
    raise RewriterError(
        f"local rank {number}: this process sees {_gpus(visible)}. Use fewer ranks, or device='cpu'{alone}"
    )


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"


def _mesh(device: torch.device, made: ModuleEntry, plan: SequencePlan | None, dp: int) -> DeviceMesh | None:
    """The mesh over all ranks, or None for one process that was not started by torchrun."""
    if not dist.is_initialized():
        if "WORLD_SIZE" not in os.environ:
            return None
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options.is_high_priority_stream = True  # else a small sum queues behind the blocks of a product
            dist.init_process_group("nccl", device_id=device, pg_options=options)
        else:
            dist.init_process_group("gloo")
    if plan is not None:
        return sequence_mesh(device.type, plan.grid, data_parallel=dp, tensor_parallel=made.tensor_ranks)
    if dp > 1:
        return init_device_mesh(device.type, (dp, made.tensor_ranks), mesh_dim_names=("dp", "tp"))
    return init_device_mesh(device.type, (made.tensor_ranks,), mesh_dim_names=("tp",))


class _FromSource(SourceFileLoader):
    """Neither reads nor leaves a __pycache__ in the output directory: its files are hashed, and only they are
    trusted."""

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _import(path: Path) -> ModuleType:
    name = f"rewriter_runtime_module_{abs(hash(str(path.resolve()))):x}"
    spec = spec_from_loader(name, _FromSource(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses, inspect and torch.compile look a class up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _EmptyOnMeta(TorchFunctionMode):
    """Parameters, which are made by torch.empty, on the meta device; constants, made from numbers, stay real.

    Nothing is initialised: random numbers on the meta device make torch import Dynamo, which takes a second.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def build(path: Path, name: str, mesh: DeviceMesh | None) -> nn.Module:
    """The model of an emitted module's class `name`: parameters on the meta device, constants with their values.

    Raises RewriterError if the file has no such class.
    """
    cls = getattr(_import(path), name, None)
    if cls is None:
        raise RewriterError(f"{path}: no class {name!r} in it, but rewrite.json names it. Rewrite the model again")
    with _EmptyOnMeta():
        model: nn.Module = cls(mesh)
    return model


def fill(
    model: nn.Module,
    weights: RankWeights,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    stream: bool = False,
    keep_quantized: bool = False,
) -> None:
    """Give `model` the tensors of `weights`, by name, without a copy on the CPU, and move its constants.

    With `stream`, parameters are read at every access: see `rewriter.weights.streaming`. Weights of
    `OffloadedEmbedding`s are on the CPU.

    A parameter with several names (tied weights) may have any of them in `weights`, and stays one parameter. With
    `dtype`, floating tensors are cast, but not the buffers that a module lists in `keeps_dtype`, nor to less than fp32
    the parameters that the model lists in `in_fp32`. With `keep_quantized`
    quantized weights stay so, and are not trained.
    Raises RewriterError for names that `weights` lack or the model does not know, and for shapes that differ.
    """
    alias, kept = _first_names(model), _kept_dtypes(model, dtype)
    expected = model.state_dict()
    chosen = {alias[name]: name for name in reversed(list(weights.parameters)) if name in expected}
    problems = [
        *_listed("unknown", [name for name in weights.parameters if name not in expected]),
        *_listed("missing", [name for name in expected if alias[name] not in chosen]),
    ]
    for name in chosen.values():
        shape, wanted = weights.shape(name), tuple(expected[name].shape)
        if shape != wanted:
            problems.append(f"{name} has shape {list(shape)}, the module expects {list(wanted)}")
    if problems:
        raise RewriterError(
            f"{weights.path}: it does not fit its module: {'; '.join(problems)}. Rewrite the model again"
        )
    casts = {name: kept.get(name, dtype if weights.dtype(name).is_floating_point else None) for name in chosen.values()}
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    now = {name: first for first, name in chosen.items() if not (stream and first in trained)}
    on_host = {f"{path}.weight" for path, m in model.named_modules() if isinstance(m, OffloadedEmbedding)}
    tensors: dict[str, torch.Tensor] = {}
    for where, names in ((device, now.keys() - on_host), ("cpu", now.keys() & on_host)):
        tensors |= weights.read({name: casts[name] for name in now if name in names}, where, keep_quantized)
    state = {now[name]: tensor for name, tensor in tensors.items()}
    # One Parameter object for all names of a tied weight: with assign=True torch would make one for each.
    parameters = {name: nn.Parameter(tensor, trained[name]) for name, tensor in state.items() if name in trained}
    whole = {name: parameters.get(alias[name], state[alias[name]]) for name in expected if alias[name] in state}
    model.load_state_dict(whole, strict=not stream, assign=True)
    if stream:

        def read(first: str) -> torch.Tensor:
            name = chosen[first]
            return weights.read({name: casts[name]}, device)[name]

        stream_parameters(model, read)
    for parameter in model.parameters():
        if isinstance(parameter, StoredWeight):
            parameter.requires_grad_(False)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    unfilled = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if unfilled:
        raise RewriterError(
            f"{weights.path}: {unfilled[0]} has no value: it is neither in the file nor a constant of the module"
        )


def _first_names(model: nn.Module) -> dict[str, str]:
    """For every name of the state, the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}


def _kept_dtypes(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """The buffers that keep their own dtype, and the parameters that are fp32 in a model of `dtype`, by full name."""
    kept = {
        f"{path}.{name}".lstrip("."): module.get_buffer(name).dtype
        for path, module in model.named_modules()
        for name in getattr(module, "keeps_dtype", ())
    }
    patterns = getattr(model, "in_fp32", {}).get(str(dtype).removeprefix("torch."), ())
    in_fp32 = [name for name, _ in model.named_parameters() if any(fnmatchcase(name, p) for p in patterns)]
    return kept | dict.fromkeys(in_fp32, torch.float32)


def _listed(what: str, names: Sequence[str]) -> Iterable[str]:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"{what} {', '.join(names[:3])}{more}"
