"""Effect of operators on the tokens that elements belong to.

A value is described by its *owners*: an int64 tensor of its shape, per element the token of a sequence that it belongs
to, −1 for none. Movement is run on owners literally; what computes with several elements needs owners that
agree. So no list says what is allowed where: an operator is refused when it brings values of two tokens together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rewriter.ir.op_semantics import Operator, aten, named_arguments, semantics

# sizes of the example: small, and unlike each other
BATCH, LENGTH = 3, 5
Owners = torch.Tensor


class Mixed(Exception):
    """Reason why a value does not belong to one token: a clause that follows the operator's name."""


class Count(int):
    """A size that follows from the number of tokens of a call."""


def tokens(*shape: int, dim: int) -> Owners:
    """Owners of a value whose elements belong to the tokens along `dim`."""
    along = [1] * len(shape)
    along[dim] = shape[dim]
    order = torch.arange(shape[dim])
    if shape[dim] % (BATCH * LENGTH) == 0:  # rows of a batch, one after the other
        order = order // (shape[dim] // (BATCH * LENGTH)) % LENGTH
    elif shape[dim] % LENGTH == 0:
        order = order // (shape[dim] // LENGTH)
    else:
        raise Mixed("makes a value of a size that is no multiple of the number of tokens")
    return order.reshape(along).expand(shape)


def nobody(*shape: int) -> Owners:
    """Owners of a value that is the same for all tokens."""
    return torch.tensor(-1).expand(shape)


def owned(owners: Owners) -> bool:
    return bool((_distinct(owners) >= 0).any())


def _distinct(owners: Owners) -> Owners:
    """The same owners with size 1 where they are expanded, so that no element is looked at twice."""
    for dim, (size, stride) in enumerate(zip(owners.shape, owners.stride(), strict=True)):
        if stride == 0 and size > 1:
            owners = owners.narrow(dim, 0, 1)
    return owners


def same(a: Owners, b: Owners) -> bool:
    """True if two values have the same shape and owners."""
    if a.shape != b.shape:
        return False
    few_a, few_b = _distinct(a), _distinct(b)
    return torch.equal(few_a, few_b) if few_a.shape == few_b.shape else torch.equal(a, b)


def merged(*owners: Owners) -> Owners:
    """Owners of what is computed element by element. Raises Mixed where two tokens meet."""
    try:
        shape = torch.broadcast_shapes(*(o.shape for o in owners))
    except RuntimeError:
        raise Mixed("has an operand of a fixed number of tokens") from None
    result = torch.tensor(-1)
    for each in map(_distinct, owners):
        if ((result >= 0) & (each >= 0) & (result != each)).any():
            raise Mixed("combines values of different tokens")
        result = torch.maximum(result, each)
    return result.expand(shape)


def alike(owners: Owners, dims: int | Sequence[int] | None, why: str) -> Owners:
    """Owners of what is computed over `dims` (None: all), which stay with size 1. Raises Mixed over several tokens."""
    every = _dims(owners, dims)
    if owners.numel() == 0 or owners.dim() == 0:
        return owners
    few = _distinct(owners)
    last = few.amax(every, keepdim=True)
    first = few.masked_fill(few < 0, LENGTH).amin(every, keepdim=True)
    if ((last >= 0) & (first != last)).any():
        raise Mixed(why)
    kept = {dim % owners.dim() for dim in every}
    return last.expand([1 if dim in kept else size for dim, size in enumerate(owners.shape)])


def _dims(owners: Owners, dims: int | Sequence[int] | None) -> list[int]:
    if dims is None or dims == []:
        return list(range(owners.dim()))
    return [dims] if isinstance(dims, int) else list(dims)


def product(a: Owners, b: Owners) -> Owners:
    """Owners of the matrix product a [..., m, k] · b [..., k, n]."""
    rows, columns = alike(a, -1, _SUMS), alike(b, 0 if b.dim() == 1 else -2, _SUMS)
    if b.dim() == 1:
        return merged(rows.squeeze(-1), columns)
    return merged(rows, columns)


_SUMS = "sums over the tokens of a call"
_OVER = "computes over the tokens of a call"
_LARGEST = (
    "takes the largest of all tokens' positions, as rotary scaling that depends on the length of a call does: ranks "
    "would find different lengths"
)

# rows that move elements: they are run on owners
_MOVED = ("view", "permutation", "copy", "expansion", "piece", "join", "stack", "shift")
_EACH_ALONE = ("pointwise", "activation")
_ALONG = ("reduction", "scan", "top")


def applied(target: Any, args: Sequence[Any], kwargs: dict[str, Any], integral: bool) -> Any:
    """Owners of what an operator makes, from arguments with owners in place of tensors; a tuple where it makes several.

    `integral` says that its first tensor holds whole numbers (positions, ids). Raises Mixed with the reason.
    """
    tensors = [a for a in flat((args, kwargs)) if isinstance(a, torch.Tensor)]
    row = semantics(target)
    kind = None if row is None else row.kind
    if any(isinstance(a, Count) for a in flat((args, kwargs))):
        return _sized(target, args, kwargs)
    if kind in _MOVED:
        return target(*args, **kwargs)
    if kind in ("cast", "creation_like"):
        return args[0]
    if kind in _EACH_ALONE:
        return merged(*tensors)
    if row is not None and row.kind == "product":
        return _product(row, args)
    if row is not None and row.kind in _ALONG:
        return _over_dim(target, row, args, kwargs, integral)
    if (rule := _RULES.get(target)) is not None:
        return rule(*args, **kwargs)
    raise Mixed("is not known to treat each token on its own")


def flat(value: Any) -> list[Any]:
    """Leaves of nested dicts, lists and tuples."""
    if isinstance(value, dict):
        value = list(value.values())
    return [x for v in value for x in flat(v)] if isinstance(value, (list, tuple)) else [value]


def _sized(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What is given a number of tokens may lay values out by it, but not compute with it."""
    row = semantics(target)
    if row is not None and row.kind == "view" and row.sizes is not None:
        return target(*args, **kwargs)
    if target is aten.expand.default:
        source, sizes = args[0], [int(s) for s in args[1]]
        result = source.expand(sizes)
        new = len(sizes) - source.dim()
        for dim, size in enumerate(args[1]):
            if isinstance(size, Count) and (dim < new or source.shape[dim - new] == 1):
                result = merged(result, tokens(*result.shape, dim=dim))
        return result
    if row is not None and row.kind in ("creation", "creation_like") and row.sizes is not None:
        sizes = args[row.sizes]
        return merged(*(tokens(*sizes, dim=dim) for dim, size in enumerate(sizes) if isinstance(size, Count)))
    if row is not None and row.kind == "count":
        raise Mixed("numbers the tokens of a call from 0; a rank's own are not the first ones")
    raise Mixed("computes with the number of tokens of a call; a rank has fewer")


def _over_dim(target: Any, row: Operator, args: Sequence[Any], kwargs: dict[str, Any], integral: bool) -> Any:
    given = named_arguments(target, args, kwargs)
    source: Owners = args[0]
    why = _LARGEST if row.function == "largest" and integral else _SUMS if "sum" in str(target) else _OVER
    dims = given.get("dim")
    result = alike(source, dims, why)
    if row.kind == "scan":
        result = result.expand(source.shape)
    elif row.kind == "top":
        sizes = list(source.shape)
        sizes[given["dim"]] = given["k"]
        result = result.expand(sizes)
    elif not given.get("keepdim"):
        result = result.squeeze(_dims(source, dims))
    return (result, result) if len(target._schema.returns) == 2 else result


def _product(row: Operator, args: Sequence[Any]) -> Owners:
    left, right = (args[i] for i in row.factors)
    out = product(left, right.transpose(-1, -2) if row.transposed else right)
    bias = args[row.bias] if row.bias is not None and row.bias < len(args) else None
    return out if bias is None else merged(bias, out)


def _embedding(weight: Owners, ids: Owners, *_: Any, **__: Any) -> Owners:
    if owned(weight):
        raise Mixed("looks values up by token")
    return ids.unsqueeze(-1).expand(*ids.shape, weight.shape[-1])


def _normalized(x: Owners, sizes: Sequence[int], *_: Any) -> Owners:
    return alike(x, list(range(-len(sizes), 0)), _OVER).expand(x.shape)


def _index(x: Owners, places: Sequence[Owners | None]) -> Owners:
    given = [p for p in places if p is not None]
    if owned(x) or len(given) != 1:
        raise Mixed("picks values by index out of those of several tokens")
    dim = next(i for i, p in enumerate(places) if p is not None)
    shape = (*x.shape[:dim], *given[0].shape, *x.shape[dim + 1 :])
    return given[0].reshape(*given[0].shape, *[1] * (x.dim() - dim - 1)).expand(shape)


def _index_select(x: Owners, dim: int, places: Owners) -> Owners:
    out = alike(x, dim, "picks tokens by index")
    sizes = [places.shape[0] if d == dim % x.dim() else s for d, s in enumerate(x.shape)]
    along = [places.shape[0] if d == dim % x.dim() else 1 for d in range(x.dim())]
    return merged(out.expand(sizes), places.reshape(along))


def _gather(x: Owners, dim: int, places: Owners, **_: Any) -> Owners:
    chosen = alike(x, dim, "picks tokens by index")
    sizes = [slice(0, s) for s in places.shape]
    sizes[dim] = slice(0, 1)
    return merged(chosen[tuple(sizes)], places)


def _scatter(x: Owners, dim: int, places: Owners, source: Any, **_: Any) -> Owners:
    written = merged(places, *([source] if isinstance(source, torch.Tensor) else []))
    return merged(*(alike(each, dim, "writes to tokens by index") for each in (x, written))).expand(x.shape)


def attended(q: Owners, k: Owners, v: Owners) -> Owners:
    """Owners of attention's result [B, H, S, E], its queries'. Raises Mixed unless all are the tokens in order."""
    for name, each in (("queries", q), ("keys", k), ("values", v)):
        if each.shape[2] != LENGTH or ((each >= 0) & (each != tokens(*each.shape, dim=2))).any():
            raise Mixed(f"has {name} that are not the call's tokens in their order")
    return tokens(*q.shape[:3], v.shape[3], dim=2)


def chosen_experts(x_NC: Owners, index_NK: Owners, weight_NK: Owners) -> Owners:
    rows = [alike(each, -1, _SUMS) for each in (x_NC, index_NK, weight_NK)]
    return merged(*rows).expand(x_NC.shape)


_RULES: dict[Any, Callable[..., Any]] = {
    aten.view_as_complex.default: lambda x: alike(x, -1, _OVER).squeeze(-1),
    aten.view_as_real.default: lambda x: torch.stack([x, x], -1),
    aten.constant_pad_nd.default: lambda x, amounts, *_: aten.constant_pad_nd.default(x, amounts, -1),
    aten.layer_norm.default: _normalized,
    aten.rms_norm.default: _normalized,
    aten.embedding.default: _embedding,
    aten.one_hot.default: lambda x, classes: x.unsqueeze(-1).expand(*x.shape, classes),
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    aten.scatter.src: _scatter,
    aten.scatter.value: _scatter,
}
