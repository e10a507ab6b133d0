"""Weights after training, written quantized, with what that does to the loss.

A model that was trained with quantized gathers (qwZ) has computed with quantized weights all along: written in the same
format, it is the model that was trained ("naturally weight-quantized", ZeRO++). `export_quantized` measures whether so:
the loss on given batches with the weights as they are and as they are written.

A directory holds `model.safetensors` and `quantization.json`. Every matrix (two or more dimensions) is a payload, uint8
[rows, bytes], each row quantized by itself; vectors and buffers are as they were. The JSON says format, shape and dtype
of each payload, and which names are tied to which.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from rewriter.common.errors import RewriterError
from rewriter.kernels import Format, dequantize_rows, parse_format, quantize_rows
from rewriter.runtime.agreement import checksum
from rewriter.training.zero.frozen import FrozenLinear

WEIGHTS, DESCRIPTION = "model.safetensors", "quantization.json"
_VERSION = 1
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float16, torch.bfloat16)}

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Exported:
    """What was written, and the mean loss over the batches with the weights as they are and as written; None without
    batches. `bytes_before`, `bytes_after`: of all parameters, whole."""

    format: str
    bytes_before: int
    bytes_after: int
    loss_before: float | None
    loss_after: float | None

    @property
    def difference(self) -> float | None:
        """How much the loss rises."""
        return None if self.loss_before is None or self.loss_after is None else self.loss_after - self.loss_before


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that a model of transformers returns for the keyword arguments in `batch`."""
    found: Tensor = model(**batch).loss
    return found


def export_quantized(
    model: nn.Module,
    folder: str | os.PathLike[str],
    format: str,
    *,
    batches: Iterable[Any] = (),
    loss: Loss = own_loss,
    alone: bool = False,
) -> Exported:
    """Write the weights of `model` in `format` to the new directory `folder`, and compare losses on `batches`.

    All ranks call this, with equally many batches, of their own if they like (losses are the mean over ranks), and the
    first writes; the model may be sharded by `fully_shard`. alone: this rank alone calls it and writes, as replicas do
    that save on the first; it has the whole model, and whether others agree is not looked at. Weights that
    `quantize_frozen` quantized are written in their own format, unchanged. The model keeps its weights. `folder` is
    there complete, or not at all.

    Raises RewriterError for a format that does not exist, a weight of another dtype than bf16, fp16 and fp32, a folder
    that exists, parameters that are sharded otherwise than by rows, ranks with unequal numbers of batches, tensors that
    differ between ranks, and a sharded model that one rank exports alone.
    """
    parsed, target = _parsed(format, "export_quantized"), Path(folder)
    together = dist.is_initialized() and not alone
    if alone:
        _check_whole(model)
    _first(lambda: _absent(target), together)
    given = list(batches)
    if together:
        _check_counts(model, len(given))
    before = after = None
    if given:
        before = _mean(model, given, loss, together)
        with _rounded(model, parsed):
            after = _mean(model, given, loss, together)
    tensors, table, sizes = _written(model, parsed, together)
    _first(lambda: _write(target, tensors, table), together)
    return Exported(str(parsed), *sizes, before, after)


def load_quantized(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The dequantized state of a directory that `export_quantized` wrote, for `load_state_dict` of the plain model.

    Raises RewriterError for a directory that is not such a one: files that are missing or damaged, formats or dtypes
    that do not exist, and payloads of another size than their shape has.
    """
    path = Path(folder)
    table = _description(path)
    found: dict[str, Tensor] = {}
    try:
        with safe_open(path / WEIGHTS, framework="pt") as file:
            names = set(file.keys())
            if missing := sorted(set(table["weights"]) - names):
                raise RewriterError(f"{path / WEIGHTS}: it has no {missing[0]}, which {DESCRIPTION} lists")
            for name in sorted(names):
                tensor = file.get_tensor(name)
                entry = table["weights"].get(name)
                found[name] = tensor if entry is None else _read(f"{path}: {name}", tensor, entry)
    except (OSError, SafetensorError) as error:
        raise RewriterError(f"{path / WEIGHTS}: cannot be read ({error}). Export the model again") from error
    for name, source in table["tied"].items():
        if source not in found or name in found:
            raise RewriterError(
                f"{path / DESCRIPTION}: {name} is tied to {source}, which is not there. Export it again"
            )
        found[name] = found[source]
    return found


# --- what is quantized ---


def _parsed(format: Any, where: str) -> Format:
    try:
        return parse_format(format)
    except ValueError as error:
        raise RewriterError(f"{where}: {error}") from None


def _check_whole(model: nn.Module) -> None:
    sharded = [type(module).__name__ for module in model.modules() if isinstance(module, FSDPModule)]
    sharded += [name for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, DTensor)]
    if sharded:
        raise RewriterError(
            f"export_quantized: {sharded[0]} is sharded over ranks, and one cannot export it alone. Call it on all of "
            "them, without alone=True"
        )


def _check_counts(model: nn.Module, count: int) -> None:
    """A rank without a batch would not take part in the others' forward passes."""
    most = torch.tensor([count, -count], device=_device(model))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    largest, smallest = int(most[0]), -int(most[1])
    if smallest != largest:
        raise RewriterError(
            f"export_quantized: ranks have {smallest} to {largest} batches (this one {count}), expected equally many"
        )


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _first(action: Callable[[], None], together: bool) -> None:
    """Do it on the first rank alone; what it raises, all raise."""
    told: list[str | None] = [None]
    if not together or dist.get_rank() == 0:
        try:
            action()
        except (RewriterError, OSError) as error:
            told = [str(error)]
    if together:
        dist.broadcast_object_list(told, src=0)
    if told[0] is not None:
        raise RewriterError(told[0])


def _matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter that is quantized, once, checked, and sharded again where a forward pass left it whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or not parameter.is_floating_point():
            continue
        if parameter.dtype not in _DTYPES.values():
            raise RewriterError(f"export_quantized: {name} is {parameter.dtype}; expected one of {', '.join(_DTYPES)}")
        if isinstance(parameter, DTensor) and any(
            isinstance(place, Shard) and place.dim != 0 for place in parameter.placements
        ):
            raise RewriterError(
                f"export_quantized: {name} is placed as {parameter.placements}; expected rows sharded, as fully_shard's"
            )
        found[name] = parameter
    return found


@contextmanager
def _rounded(model: nn.Module, format: Format) -> Iterator[None]:
    """Weights as they will be read back, each rank's rows by themselves; the exact ones return at the end."""
    exact: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad():
            for parameter in _matrices(model).values():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
                if local.numel():
                    exact.append((local, local.clone()))
                    rows = local.reshape(-1, local.shape[-1])
                    read = dequantize_rows(quantize_rows(rows, format), format, rows.shape[1], rows.dtype)
                    local.copy_(read.view(local.shape))
        yield
    finally:
        _matrices(model)
        with torch.no_grad():
            for local, before in exact:
                local.copy_(before)


def _mean(model: nn.Module, batches: list[Any], loss: Loss, together: bool) -> float:
    """The mean loss over the batches of all ranks, without gradients and in eval mode."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            total = sum((loss(model, batch).detach().double().cpu() for batch in batches), torch.zeros(()).double())
    finally:
        model.train(training)
    pair = torch.tensor([float(total), float(len(batches))], dtype=torch.float64)
    if together:
        pair = pair.to(_device(model))
        dist.all_reduce(pair)
    return float(pair[0] / pair[1])


def _written(
    model: nn.Module, format: Format, together: bool
) -> tuple[dict[str, Tensor], dict[str, Any], tuple[int, int]]:
    """(tensors by name, the description, bytes of the parameters before and after); of whole tensors, on the CPU.

    Every rank gathers each sharded tensor; those that do not write let go of it at once.
    """
    writes = not together or dist.get_rank() == 0
    frozen = {
        f"{path}.payload".removeprefix("."): m for path, m in model.named_modules() if isinstance(m, FrozenLinear)
    }
    quantized = {id(p) for p in _matrices(model).values()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors: dict[str, Tensor] = {}
    weights: dict[str, Any] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    sums: dict[str, Tensor] = {}
    before = after = 0
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise RewriterError(f"export_quantized: {name} is {type(value).__name__}; expected tensors alone")
        stored = name if name not in frozen else name.removesuffix("payload") + "weight"
        if id(value) in first:
            tied[stored] = first[id(value)]
            continue
        first[id(value)] = stored
        whole = value.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        size = whole.nbytes
        if name in frozen:
            layer = frozen[name]
            weights[stored] = _entry(layer.format, (layer.out_features, layer.in_features), layer.dtype)
            size = layer.out_features * layer.in_features * layer.dtype.itemsize
        elif id(value) in quantized:
            weights[stored] = _entry(format, whole.shape, whole.dtype)
            whole = quantize_rows(whole.reshape(-1, whole.shape[-1]), format)
        sums[stored] = checksum(whole)
        if name in parameters:
            before, after = before + size, after + whole.nbytes
        if writes:
            tensors[stored] = whole.cpu().contiguous().clone()
    if together and sums:
        _same_on_all_ranks(sums)
    return tensors, {"version": _VERSION, "weights": weights, "tied": tied}, (before, after)


def _same_on_all_ranks(sums: dict[str, Tensor]) -> None:
    """The first rank writes for all. Those of a tensor-parallel model hold parts of their own."""
    least = torch.stack(list(sums.values()))
    most = least.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    for name, differs in zip(sums, (least != most).tolist(), strict=True):
        if differs:
            raise RewriterError(
                f"export_quantized: {name} differs between ranks, as in a model that is split over tensor-parallel "
                "ranks. Load its weights into the whole model, and export that"
            )


def _entry(format: Format, shape: Iterable[int], dtype: torch.dtype) -> dict[str, Any]:
    return {"format": str(format), "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}


# --- files ---


def _absent(target: Path) -> None:
    if target.exists():
        raise RewriterError(f"export_quantized: {target} exists. Choose another folder, or remove it first")


def _write(target: Path, tensors: dict[str, Tensor], table: dict[str, Any]) -> None:
    staging = target.with_name(f".{target.name}.exporting-{os.getpid()}")
    staging.mkdir(parents=True)
    try:
        save_file(tensors, staging / WEIGHTS, metadata={"format": "pt"})
        (staging / DESCRIPTION).write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        for name in (WEIGHTS, DESCRIPTION):
            with open(staging / name, "rb") as file:
                os.fsync(file.fileno())
        staging.rename(target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _description(path: Path) -> dict[str, Any]:
    """The JSON of a directory, with its tables checked for their types."""
    file = path / DESCRIPTION
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RewriterError(f"{file} is not there. Give a directory that export_quantized wrote") from None
    except (OSError, ValueError) as error:
        raise RewriterError(f"{file}: cannot be read as JSON ({error}). Export the model again") from error
    if not isinstance(table, dict) or table.get("version") != _VERSION:
        version = table.get("version") if isinstance(table, dict) else None
        raise RewriterError(f"{file}: version {version!r}; expected {_VERSION}. Export the model again")
    weights, tied = table.get("weights"), table.get("tied")
    if not isinstance(weights, dict) or not isinstance(tied, dict):
        raise RewriterError(f"{file}: expected tables 'weights' and 'tied'. Export the model again")
    if not all(isinstance(source, str) for source in tied.values()):
        raise RewriterError(f"{file}: 'tied' names things that are no names. Export the model again")
    return table


def _read(where: str, payload_RB: Tensor, entry: Any) -> Tensor:
    """The weight of a payload, after its description was checked against it."""
    if not isinstance(entry, dict):
        raise RewriterError(f"{where}: {entry!r}; expected format, shape and dtype")
    if not isinstance(entry.get("format"), str):
        raise RewriterError(f"{where}: format {entry.get('format')!r}; expected a name")
    format, shape, dtype = _parsed(entry["format"], where), entry.get("shape"), _DTYPES.get(str(entry.get("dtype")))
    if dtype is None:
        raise RewriterError(f"{where}: dtype {entry.get('dtype')!r}; expected one of {', '.join(_DTYPES)}")
    if not isinstance(shape, list) or len(shape) < 2 or not all(type(n) is int and n > 0 for n in shape):
        raise RewriterError(f"{where}: shape {shape!r}; expected two sizes or more. Export the model again")
    expected = [math.prod(shape[:-1]), format.payload_bytes(shape[-1])]
    if payload_RB.dtype != torch.uint8 or list(payload_RB.shape) != expected:
        raise RewriterError(
            f"{where}: {payload_RB.dtype} {list(payload_RB.shape)}; expected torch.uint8 {expected} for {format} of "
            f"shape {shape}. Export the model again"
        )
    return dequantize_rows(payload_RB, format, shape[-1], dtype).view(shape)
