"""The sizes of a model's config that several numbers of ranks divide, as little larger as possible.

Settings are found by their names (`rewriter.common.shrink_sizes`); what a size means for the weights is read from a
trace of the model that has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.common.shrink_sizes import ALIGNED, GROUPS, HEAD_SIZES, HEADS, HIDDEN, INNER, KV_HEADS, LATENT, MIXERS
from rewriter.ir.resizing import Sizes

VOCABULARY_ROWS = 64  # engines pad a vocabulary to a multiple of this, and ranks share that
_ROUND = 64  # channels of a rank: kernels are fastest on whole tiles
_LITTLE = 16  # and a sixteenth more than needed is paid for that, at most
_MOST = 4096  # heads


@dataclass(frozen=True)
class Blocks:
    """Elements that quantized weights hold in one group, along any dimension: of attention, of recurrent mixers and of
    everything else. 1 where nothing is quantized."""

    attention: int = 1
    mixers: int = 1
    channels: int = 1


def fitted_sizes(table: Mapping[str, Any], ranks: Sequence[int], blocks: Blocks = Blocks()) -> dict[str, Any]:
    """The settings in `table`, one model's, that have to change so that each number of `ranks` divides, by name.

    Heads of attention and of recurrent mixers are padded in whole groups, widths of MLPs and experts to a multiple of
    whole tiles or groups, the vocabulary so that engines can share it. Raises RewriterError where a setting is no
    number, or no number of heads is found.
    """
    new: dict[str, Any] = {}
    for heads, groups in _paired(table, HEADS, KV_HEADS):
        changes = _attention(table, heads, groups, ranks, blocks.attention)
        if changes and not any(isinstance(table.get(name), int) for name in (*HEAD_SIZES, *LATENT)):
            changes["head_dim"] = _head_size(table, heads)
        new |= changes
    new |= _recurrent(table, ranks, blocks.mixers)
    for name in INNER:
        if _is_size(table.get(name)):
            new[name] = _channels(table[name], ranks, blocks.channels)
        elif isinstance(table.get(name), list) and all(map(_is_size, table[name])):
            new[name] = [_channels(size, ranks, blocks.channels) for size in table[name]]
    if _is_size(table.get("vocab_size")):
        new["vocab_size"] = vocabulary(table["vocab_size"], ranks)
    return {name: value for name, value in new.items() if value != table.get(name)}


@dataclass(frozen=True)
class Twin:
    """Classes that compute what a model's own do where it has the settings `where`, with `also` among their own."""

    model_type: str
    where: Mapping[str, Any]
    also: Mapping[str, Any]


TWINS: Mapping[str, Twin] = {
    "llama": Twin("mistral", {"attention_bias": False, "mlp_bias": False}, {"sliding_window": None}),
}


def as_written(table: Mapping[str, Any], model_type: str, settings: Mapping[str, Any]) -> Iterator[Sizes]:
    """Ways to say these settings, the best first.

    Some classes of configs refuse heads that do not divide the width, whatever the size of a head (Llama, Gemma 3).
    Others compute the same and do not (Mistral for Llama); else the number of heads is said when the model is loaded,
    which no class checks.
    """
    yield Sizes(settings)
    twin = TWINS.get(model_type)
    if twin is not None and all(table.get(name) == value for name, value in twin.where.items()):
        yield Sizes({**settings, **twin.also}, model_type=twin.model_type)
    heads = {name: value for name, value in settings.items() if name in HEADS}
    if heads:
        yield Sizes({name: value for name, value in settings.items() if name not in heads}, heads)


def vocabulary(size: int, ranks: Sequence[int]) -> int:
    """A vocabulary that can be shared by these ranks, as it is and as engines pad it."""
    step = lcm(*ranks)
    if size % step == 0 and _up(size, VOCABULARY_ROWS) % step == 0:
        return size
    return _up(size, lcm(step, VOCABULARY_ROWS))


def _channels(size: int, ranks: Sequence[int], block: int) -> int:
    """A width of which every rank has whole groups, and channels as well aligned as all were."""
    step = lcm(*ranks)
    if size % (step * block) == 0:
        return size
    least = _up(size, step * lcm(block, gcd(size, ALIGNED)))
    tiles = (_ROUND >> shift for shift in range(_ROUND.bit_length()))
    return next(
        (made for tile in tiles if (made := _up(size, step * lcm(block, tile))) <= least + least // _LITTLE), least
    )


def grouped_heads(
    heads: int, groups: int, ranks: Sequence[int], *, shared: bool, costs: tuple[int, int] = (1, 1), block: int = 1
) -> tuple[int, int]:
    """(heads, groups) that hold `heads` in `groups` of equal size, each group's heads together, and divide by every
    number of `ranks`.

    Where a group holds fewer heads than before it is there several times, once for each part of its heads. `shared`:
    ranks may hold one group together, where their number is a multiple of the groups'. `costs` of a head and of a group
    choose between those that fit. The heads and groups of a rank are a multiple of `block`. Raises RewriterError where
    none is found.
    """
    if groups == heads:
        most = _up(heads, lcm(*ranks) * block)
        return most, most
    best: tuple[int, int, int] | None = None
    served = heads // groups
    step = lcm(*ranks)
    for count in range(groups, min(_up(heads, step * block), _MOST) + 1):
        if not all(_divides(count, n, block, shared) for n in ranks):
            continue
        for size in range(1, served + step * block + 1):
            if groups * -(-served // size) > count or any(count * size % (n * block) for n in ranks):
                continue
            cost = (count * size * costs[0] + count * costs[1], count, count * size)
            best = min(best or cost, cost)
            if size >= served:
                break
    if best is None:
        numbers = ", ".join(map(str, ranks))
        raise RewriterError(
            f"fit_ranks: no number of heads near {heads} in {groups} groups divides by {numbers}. Take fewer ranks, or "
            "an output for each number"
        )
    return best[2], best[1]


def _divides(groups: int, ranks: int, block: int, shared: bool) -> bool:
    return groups % (ranks * block) == 0 or (shared and groups < ranks and ranks % groups == 0)


def _attention(
    table: Mapping[str, Any], heads: str, groups: str | None, ranks: Sequence[int], block: int
) -> dict[str, Any]:
    many, few = table[heads], table[heads if groups is None else groups]
    if isinstance(many, list) or isinstance(few, list):
        pairs = [(h, g) for h, g in zip(_listed(many, few), _listed(few, many), strict=True)]
    else:
        pairs = [(many, few)]
    if _is_size(table.get("kv_lora_rank")):  # keys and values of every head come from one latent value
        groups, pairs = (groups if few == many else None), [(h, h) for h, _ in pairs]
    of_head = block // gcd(block, _head_size(table, heads)) if block > 1 else 1
    made = [grouped_heads(h, min(g, h), ranks, shared=True, block=of_head) for h, g in pairs]
    changes: dict[str, Any] = {heads: [h for h, _ in made] if isinstance(many, list) else made[0][0]}
    if groups is not None:
        changes[groups] = [g for _, g in made] if isinstance(few, list) else made[0][1]
    return {name: value for name, value in changes.items() if value != table[name]}


def _recurrent(table: Mapping[str, Any], ranks: Sequence[int], block: int) -> dict[str, Any]:
    new: dict[str, Any] = {}
    if _is_size(table.get("linear_num_key_heads")) and _is_size(table.get("linear_num_value_heads")):
        values, keys = table["linear_num_value_heads"], table["linear_num_key_heads"]
        costs = 3 * int(table.get("linear_value_head_dim") or 1), 2 * int(table.get("linear_key_head_dim") or 1)
        of_head = block // gcd(block, int(table.get("linear_value_head_dim") or 1)) if block > 1 else 1
        made = grouped_heads(values, keys, ranks, shared=False, costs=costs, block=of_head)
        new |= {"linear_num_value_heads": made[0], "linear_num_key_heads": made[1]}
    if _is_size(table.get("linear_num_heads")):
        new["linear_num_heads"] = _up(table["linear_num_heads"], lcm(*ranks))
    for count, size, expand, inner in MIXERS:
        if not (_is_size(table.get(count)) and _is_size(table.get(size))) or (
            count == "num_heads" and not isinstance(table.get(expand), int)
        ):
            continue
        groups = next((name for name in GROUPS if _is_size(table.get(name))), None)
        number = table[groups] if groups else 1
        # its norm is over all heads of a group, so that whole groups are padded
        whole = _up(number, lcm(*ranks)) if number > 1 else 1
        new[count] = whole * table[count] // number if number > 1 else _up(table[count], lcm(*ranks))
        if groups is not None:
            new[groups] = whole
        if _is_size(table.get(inner)):
            new[inner] = new[count] * table[size]
    return new


def _paired(table: Mapping[str, Any], heads: Sequence[str], groups: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """The names of numbers of query heads, each with that of its key/value heads, if they have their own."""
    for name in heads:
        if not (_is_size(table.get(name)) or isinstance(table.get(name), list)):
            continue
        if name == "num_heads" and any(isinstance(table.get(m[2]), int) for m in MIXERS if m[0] == name):
            continue  # of a recurrent mixer
        own = [group for group in groups if group.startswith("swa_") == name.startswith("swa_")]
        yield (
            name,
            next((group for group in own if _is_size(table.get(group)) or isinstance(table.get(group), list)), None),
        )


def _head_size(table: Mapping[str, Any], heads: str) -> int:
    named = next((table[name] for name in HEAD_SIZES if _is_size(table.get(name))), None)
    if named is not None:
        return int(named)
    hidden, count = next((table[name] for name in HIDDEN if _is_size(table.get(name))), 0), table[heads]
    return hidden // (max(count) if isinstance(count, list) else count) or 1


def _listed(value: Any, like: Any) -> list[int]:
    return value if isinstance(value, list) else [value] * len(like)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
