"""What operators do to the tokens that elements belong to.

A value is told by its *owners*: an int64 tensor of its shape which says of each element to which token of a sequence it
belongs, −1 for none. Movement is run on owners literally; whatever computes with several elements needs owners that
agree. So no list says what is allowed where: an operator is refused when it brings values of two tokens together.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rewriter import ops
from rewriter.analysis.labels import MOVEMENT

aten = torch.ops.aten

# sizes of the example: small, and unlike each other
BATCH, LENGTH = 3, 5
Owners = torch.Tensor


class Mixed(Exception):
    """Why a value does not belong to one token, in words that go on from the operator's name."""


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
    """Whether two values have the same shape and owners."""
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

# operators that give one value where they are given several: over `dim`, or over everything
_REDUCTIONS = frozenset(
    {
        aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default, aten.amax.default, aten.amin.default,
        aten.any.dim, aten.any.default, aten.all.dim, aten.all.default, aten.argmax.default, aten.argmin.default,
        aten.logsumexp.default, aten.prod.default, aten.prod.dim_int, aten.var.correction, aten.std.correction,
        aten.linalg_vector_norm.default, aten.max.default, aten.max.dim, aten.min.default, aten.min.dim,
        aten.norm.ScalarOpt_dim,
    }
)  # fmt: skip
_LARGEST_OF = frozenset({aten.max.default, aten.max.dim, aten.amax.default})
# operators that compute along `dim` and keep the shape
_ALONG = frozenset(
    {
        aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default, aten.cumsum.default,
        aten.cumprod.default, aten.sort.default, aten.argsort.default,
    }
)  # fmt: skip
_PAIRS = frozenset({aten.max.dim, aten.min.dim, aten.sort.default, aten.topk.default})
_MADE = frozenset({aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format})
_MADE_LIKE = frozenset({aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default})
_ARANGE = frozenset(getattr(aten.arange, name) for name in aten.arange.overloads())
_SIZED = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unflatten.int})
_MOVEMENT = MOVEMENT | {
    aten.flip.default, aten.repeat.default, aten.narrow.default, aten.swapaxes.default, aten.concat.default,
}  # fmt: skip
# operators that compute element by element, without torch's tag of those that do
_PLAIN = (
    aten.polar.default, aten.complex.default,
    operator.add, operator.iadd, operator.sub, operator.mul, operator.imul, operator.truediv, operator.neg,
    operator.pow, torch.add, torch.mul, torch.tanh, ops.dropout,
)  # fmt: skip
# operators that keep each element's place; a second tensor lends its dtype only
_CASTS = frozenset(
    {
        aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
        ops.type_as_model, aten.type_as.default, aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other,
        aten._to_copy.default,
    }
)  # fmt: skip
ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.neg)


def applied(target: Any, args: Sequence[Any], kwargs: dict[str, Any], integral: bool) -> Any:
    """Owners of what an operator makes, from arguments with owners in place of tensors; a tuple where it makes several.

    `integral` says that its first tensor holds whole numbers (positions, ids). Raises Mixed with the reason.
    """
    found = [a for a in _flat((args, kwargs)) if isinstance(a, torch.Tensor)]
    if any(isinstance(a, Count) for a in _flat((args, kwargs))):
        return _sized(target, args, kwargs)
    if target is aten.view_as_complex.default:
        return alike(args[0], -1, _OVER).squeeze(-1)
    if target is aten.view_as_real.default:
        return torch.stack([args[0], args[0]], -1)
    if target in _MOVEMENT:
        return target(*args, **kwargs)
    if target is aten.constant_pad_nd.default:
        return target(args[0], args[1], -1)
    if target in _CASTS:
        return args[0]
    if target in _PLAIN or _is_pointwise(target):
        return merged(*found)
    if target in (aten.layer_norm.default, aten.rms_norm.default):
        dims = list(range(-len(args[1]), 0))
        return alike(args[0], dims, _OVER).expand(args[0].shape)
    rule = _RULES.get(target)
    if rule is not None:
        return rule(*args, **kwargs)
    if target in _REDUCTIONS or target in _ALONG or target is aten.topk.default:
        return _over_dim(target, args, kwargs, integral)
    raise Mixed("is not known to treat each token on its own")


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [x for v in value for x in _flat(v)] if isinstance(value, (list, tuple)) else [value]


def _is_pointwise(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def _sized(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What is given a number of tokens may lay values out by it, but not compute with it."""
    if target in _SIZED:
        return target(*args, **kwargs)
    if target is aten.expand.default:
        source, sizes = args[0], [int(s) for s in args[1]]
        result = source.expand(sizes)
        new = len(sizes) - source.dim()
        for dim, size in enumerate(args[1]):
            if isinstance(size, Count) and (dim < new or source.shape[dim - new] == 1):
                result = merged(result, tokens(*result.shape, dim=dim))
        return result
    if target in _MADE or target in _MADE_LIKE:
        sizes = args[1] if target in _MADE_LIKE else args[0]
        found = [tokens(*sizes, dim=dim) for dim, size in enumerate(sizes) if isinstance(size, Count)]
        return merged(*found)
    if target in _ARANGE:
        raise Mixed("numbers the tokens of a call from 0; a rank's own are not the first ones")
    raise Mixed("computes with the number of tokens of a call; a rank has fewer")


def _over_dim(target: Any, args: Sequence[Any], kwargs: dict[str, Any], integral: bool) -> Any:
    given = _by_name(target, args, kwargs)
    source: Owners = args[0]
    why = _LARGEST if target in _LARGEST_OF and integral else _SUMS if "sum" in str(target) else _OVER
    dims = given.get("dim")
    result = alike(source, dims, why)
    if target in _ALONG:
        result = result.expand(source.shape)
    elif target is aten.topk.default:
        sizes = list(source.shape)
        sizes[given["dim"]] = given["k"]
        result = result.expand(sizes)
    elif not given.get("keepdim"):
        result = result.squeeze(_dims(source, dims))
    return (result, result) if target in _PAIRS else result


def _by_name(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an ATen operator by name, with defaults; its schema is torch's own, and read only here."""
    schema = target._schema.arguments
    values = {a.name: a.default_value for a in schema if a.has_default_value()}
    return values | {a.name: v for a, v in zip(schema, args, strict=False)} | kwargs


def _linear(x: Owners, weight: Owners, bias: Owners | None = None) -> Owners:
    out = product(x, weight.transpose(-1, -2))
    return out if bias is None else merged(out, bias)


def _addmm(bias: Owners, a: Owners, b: Owners, **_: Any) -> Owners:
    return merged(bias, product(a, b))


def _embedding(weight: Owners, ids: Owners, *_: Any, **__: Any) -> Owners:
    if owned(weight):
        raise Mixed("looks values up by token")
    return ids.unsqueeze(-1).expand(*ids.shape, weight.shape[-1])


def _one_hot(x: Owners, classes: int) -> Owners:
    return x.unsqueeze(-1).expand(*x.shape, classes)


def _index(x: Owners, places: Sequence[Owners | None]) -> Owners:
    given = [p for p in places if p is not None]
    if owned(x) or len(given) != 1:
        raise Mixed("picks values by index out of those of several tokens")
    dim = places.index(given[0]) if given[0] is places[0] else next(i for i, p in enumerate(places) if p is not None)
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
    values = [source] if isinstance(source, torch.Tensor) else []
    written = merged(places, *values)
    return merged(alike(x, dim, "writes to tokens by index"), alike(written, dim, "writes to tokens by index")).expand(
        x.shape
    )


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
    aten.linear.default: _linear,
    aten.mm.default: product,
    aten.bmm.default: product,
    aten.matmul.default: product,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _addmm,
    aten.embedding.default: _embedding,
    aten.one_hot.default: _one_hot,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    aten.scatter.src: _scatter,
    aten.scatter.value: _scatter,
}
