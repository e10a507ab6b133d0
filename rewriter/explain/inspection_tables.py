"""An inspection as tables for the terminal. Reads the inspection's data only, so that JSON says the same."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rewriter.common.numbers import BYTES, amount, size
from rewriter.common.tables import FittingTable, plain_table
from rewriter.passes.selection import spans


def tables(data: Mapping[str, Any], verbose: bool = True) -> Group:
    """Header, blocks, communication, plans for sharded tokens, memory and rules that did not fire; without `verbose`,
    none of routine passes."""
    parts: list[RenderableType] = [_header(data)]
    if passes := [entry for entry in data["passes"] if verbose or entry["fired"] or not entry["routine"]]:
        words = {"name": "pass", "kind": "kind", "summary": "what it did"}
        parts.append(_entries("Passes", words, passes, ("kind",)))
    phases = data["phases"]
    if phases:
        parts.append(
            Text(f"Rewired tokens: {phases['rewired']}. Exact tokens: all others, and everything that is generated.")
        )
    if data["blocks"]:
        sharded = bool(data["mesh"])
        streams = data["model"]["streams"]
        parts.append(_blocks(data["blocks"], sharded, streams, ", of rewired tokens" if phases else ""))
        if phases:
            parts.append(_blocks(phases["exact"]["blocks"], sharded, streams, ", of exact tokens"))
    else:
        parts.append(Text("no residual stream: its blocks cannot be distinguished (see the rules below)"))
    if data["padding"]:
        parts.append(_padding(data["padding"]))
    parts.append(_communication(data["communication"], data["recipe"], phases))
    if data["sequence"]:
        parts += _sequence(data["sequence"])
    parts.append(_memory(data["memory"], data["mesh"]))
    if rules := [entry for entry in data["rules"] if verbose or not entry["routine"]]:
        parts.append(_entries("Where rules did not fire", {"rule": "rule", "reason": "reason"}, rules))
    return Group(*[item for part in parts for item in (part, Text())])


def _header(data: Mapping[str, Any]) -> Text:
    model = data["model"]
    ranks, sequence = data["mesh"].get("tp", 1), data["mesh"].get("sp", 1)
    over_tokens = f"tokens over {sequence} × " if sequence > 1 else ""
    where = f"{over_tokens}{ranks} rank{'s'[: ranks > 1]}" if ranks * sequence > 1 else "one device"
    recipe = data["recipe"] or ("tensor parallelism" if ranks > 1 else "as it is")
    return Text.from_markup(
        f"[bold]{escape(model['name'])}[/]  {escape(model['architecture'])}, {model['layers']} layers, "
        f"{amount(model['parameters'])} parameters{escape(_beside(model['beside_text']))}, "
        f"{escape(model['dtype'])}, {where}, recipe: {escape(recipe)}"
    )


def _beside(unused: Mapping[str, int]) -> str:
    """The parts that a forward on text does not use, by module, in words; nothing where it uses all."""
    if not unused:
        return ""
    names = [*unused] if len(unused) <= 5 else [*[*unused][:4], f"{len(unused) - 4} others"]
    return f" beside {amount(sum(unused.values()))} that a forward on text does not use ({', '.join(names)})"


def _padding(padding: Mapping[str, Any]) -> RenderableType:
    """Sizes that were padded, and layouts: what a rank holds and computes, and what of it all is waste."""
    columns = ("GPUs", "weights/rank", "waste", "products/token", "waste of products", "cache/token", "waste of cache")
    headers = {"weights/rank": "weights\n/rank", "products/token": "products\n/token", "cache/token": "cache\n/token",
               "waste of products": "waste", "waste of cache": "waste"}  # fmt: skip
    rows = []
    for layout in padding["layouts"]:
        waste = layout["waste"]
        cells = (
            layout["layout"], size(layout["weight_bytes"]), f"{waste['weights']:.1%}",
            amount(layout["products_per_token"]), f"{waste['products']:.1%}",
            size(layout["cache_bytes_per_token"]), f"{waste['cache']:.1%}",
        )  # fmt: skip
        rows.append(dict(zip(columns, cells, strict=True)))
    dropped = ("waste of cache", "cache/token", "waste of products", "products/token")
    table = FittingTable(
        columns, rows, dropped, {"GPUs": 20}, f"Padded sizes: weights {padding['weights']:+.1%}", headers,
        look={"numbers": columns[1:]},
    )  # fmt: skip
    sizes = ", ".join(f"{s['setting']} {s['before']} → {s['after']}" for s in padding["sizes"])
    caption = f"{sizes}. Waste: what all GPUs have beyond the model itself. `rewrite predict` says how fast each is."
    return Group(table, Text(caption, "dim"))


def _entries(
    title: str, columns: Mapping[str, str], entries: Sequence[Mapping[str, Any]], dropped: Sequence[str] = ()
) -> FittingTable:
    """A row per entry; `columns`: the key of each column's value, and its header. The last column is of sentences."""
    rows = [{key: escape(entry[key]) for key in columns} for entry in entries]
    return FittingTable([*columns], rows, dropped, {[*columns][-1]: 44}, title, columns)


def _blocks(blocks: Sequence[Mapping[str, Any]], sharded: bool, streams: int = 1, whose: str = "") -> Group:
    """One row per block; layers with equal reads are one group, in which i stands for the layer. `streams`: of how many
    x is. `whose`: of which tokens, as the title ends."""
    whole = all(block["on_ranks"] == "split" for block in blocks)
    extra = ("reduction", "B/token", *(() if whole else ("on ranks",))) if sharded else ()
    carried = ("x itself",) if any(block["carries"] != "as it is" for block in blocks) else ()
    columns = ("layer", "block", "reads", *carried, *extra)
    several = f" of {streams} streams" * (streams > 1)
    title = f"Residual stream{whose}: each block adds what it computes to x{several}"
    shown, styles = [], []
    for layers, rows in fold(blocks):
        label = f"{spans(layers)}" + (f" ×{len(layers)}" if len(layers) > 1 else "")
        for row in rows:
            cells = [label, *(escape(row[key]) for key in ("kind", "reads", "carries")[: 2 + len(carried)])]
            cells += [escape(row["reduction"]), row["bytes"], escape(row["on_ranks"])][: len(extra)]
            shown.append(dict(zip(columns, cells, strict=True)))
            styles.append("bold" if row["stale"] else "")
            label = ""
    wraps = {"reads": 44} | dict.fromkeys(carried, 30)
    look = {"numbers": ("B/token",)}
    table = FittingTable(columns, shown, ("B/token", "on ranks"), wraps, title, {}, styles, look)
    end = ["Every block is split over the ranks."] if sharded and whole else []
    return Group(table, *(Text(line, "dim") for line in end))


def fold(blocks: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], list[dict[str, Any]]]]:
    """(layers, their rows) of consecutive layers whose rows are equal once layers are named relative to their own."""
    groups: list[tuple[list[int], list[dict[str, Any]], list[dict[str, Any]]]] = []
    by_layer: dict[int, list[Mapping[str, Any]]] = {}
    for block in blocks:
        by_layer.setdefault(block["layer"], []).append(block)
    for layer, members in by_layer.items():
        relative = [_row(block, layer) for block in members]
        if groups and groups[-1][1] == relative:
            groups[-1][0].append(layer)
        else:
            groups.append(([layer], relative, [_row(block, None) for block in members]))
    return [(layers, relative if len(layers) > 1 else absolute) for layers, relative, absolute in groups]


def _row(block: Mapping[str, Any], layer: int | None) -> dict[str, Any]:
    """A block's cells; with `layer`, other blocks are named relative to it ("mlp i-1")."""

    def words(text: str) -> str:
        if layer is None:
            return text
        named = r"\b(attention|mlp|moe|mixer|parallel) (\d+)\b"
        return re.sub(named, lambda m: f"{m[1]} i{int(m[2]) - layer:+d}".removesuffix("+0"), text)

    return {
        "kind": ("local " if block["local"] else "") + block["kind"],
        "reads": words(block["reads"]),
        "carries": block["carries"],
        "reduction": _reduction(block),
        "bytes": f"{sum(r['bytes_per_token'] for r in block['reductions']):,}" if block["reductions"] else "–",
        "on_ranks": block["on_ranks"],
        "stale": block["stale"],
    }


def _reduction(block: Mapping[str, Any]) -> str:
    reductions = block["reductions"]
    if not reductions:
        return "dropped" if block["dropped"] else "none"
    own = ["hidden" if r["hidden"] else "exposed" for r in reductions if r["place"] == "block"]
    inner = sum(r["place"] != "block" for r in reductions)
    return " + ".join([*own, *([f"{inner} small inside, exposed"] if inner else [])])


# --- communication and memory ----------------------------------------------------------------------------------------


def _communication(
    traffic: Mapping[str, Any], recipe: str | None, phases: Mapping[str, Any] | None = None
) -> RenderableType:
    before, after = traffic["before"], traffic["after"]
    if not before["total"]["collectives"] and not (after and after["total"]["collectives"]):
        return Text.from_markup("[bold]Communication[/]\none device: nothing is communicated. --tp N shows N ranks.")
    sides = [("standard", before), *([(recipe or "after", after)] if after else [])]
    if phases:
        sides = [("standard", before), ("rewired tokens", after), ("exact tokens", phases["exact"]["communication"])]
    names = [name for name, _ in sides]
    table = plain_table("Communication per forward pass", "", *names, numbers=names, fold=("", *names))
    for key, label in _TOTALS.items():
        table.add_row(label, *(f"{side['total'][key]:,}" for _, side in sides))
    for place in dict.fromkeys(place for _, side in sides for place in side["places"]):
        cells = [
            f"{t['collectives']:,} × {t['bytes_per_token'] // t['collectives']:,} B" if t else "–"
            for t in (side["places"].get(place) for _, side in sides)
        ]
        table.add_row(_PLACES[place], *cells)
        quantized = [side["quantized"] for _, side in sides]
        if place == "block" and any(quantized):
            cells = [
                f"{q['reductions']:,}, {q['format']} from {q['from_tokens']:,} tokens on" if q else "–"
                for q in quantized
            ]
            table.add_row("  quantized", *cells)
    table.caption = traffic["convention"]
    return table


_TOTALS = {
    "collectives": "collectives",
    "hidden": "  hidden behind computation",
    "exposed": "  exposed",
    "bytes_per_token": "bytes per token",
    "exposed_bytes_per_token": "  exposed",
}
_PLACES = {
    "block": "block reductions",
    "inside a block": "inside blocks (norm statistics)",
    "embedding": "of the embedding",
    "head": "of the head (logits gathered)",
    "other": "elsewhere",
}


# --- plans for sharded tokens ----------------------------------------------------------------------------------------

_PLANS_SHOWN = 8
_SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


def _sequence(ranking: Mapping[str, Any]) -> list[RenderableType]:
    """The best plans, the best of each kind and the chosen one, with what they cost; then what is to be said."""
    heads = " + ".join(
        f"{a['layers']} layers of {a['q_heads']}:{a['kv_heads']} heads{' with a window' if a['window'] else ''}"
        for a in ranking["attention"]
    )
    kinds: set[str] = set()
    shown: list[tuple[int, Mapping[str, Any]]] = []
    for place, plan in enumerate(ranking["plans"], 1):
        if place <= _PLANS_SHOWN or plan["kind"] not in kinds or plan["chosen"]:
            shown.append((place, plan))
        kinds.add(plan["kind"])
    # one unit a column, so that rows can be compared and a narrow terminal breaks cells at the sign
    traffic = _unit(min(min(p["bytes_forward"], p["bytes_backward"]) for _, p in shown), BYTES)
    memory = _unit(min(p["memory_saved"] for _, p in shown), BYTES)
    time = _unit(min(min(p["seconds_forward"], p["seconds_backward"]) for _, p in shown), _SECONDS)
    columns = {"": "", "plan": "plan", "sent": f"sent,\n{traffic[1]}", "memory": f"memory,\n{memory[1]}",
               "time": f"time,\n{time[1]}", "waiting": "waiting", "bound": "× bound"}  # fmt: skip
    title = (
        f"Attention over {ranking['ranks']} ranks, {ranking['tokens']:,} tokens: all layers, the rank that sends most"
    )
    rows = []
    for place, plan in shown:
        forward, backward = plan["seconds_forward"], plan["seconds_backward"]
        cells = (
            f"{place}",
            escape(plan["name"]),
            _sum(traffic, plan["bytes_forward"], plan["bytes_backward"]),
            _sum(memory, plan["memory_saved"], plan["memory_live"]) + ("" if plan["fits"] else " !"),
            _sum(time, forward, backward),
            _sum(time, forward + backward - plan["seconds_compute"]),
            f"{plan['times_lower_bound']:.2f}",
        )
        rows.append(dict(zip(columns, cells, strict=True)))
    styles = ["bold" if plan["chosen"] else "" for _, plan in shown]
    numbers = [name for name in columns if name != "plan"]
    dropped = ("waiting", "bound", "memory", "sent")
    table = FittingTable([*columns], rows, dropped, {}, title, columns, styles, {"numbers": numbers})
    bound, fabric = ranking["lower_bound"], ranking["fabric"]
    caption = (
        f"{heads}. A grid is heads × rows × columns: heads are exchanged, then queries travel in rows, keys and values "
        f"in columns. Sent and time: forward + backward. Memory: kept for backward + needed at the peak of one layer. "
        f"Waiting: time beyond arithmetic. Time on {fabric['device']['name']}, "
        f"{fabric['node']} per node, {fabric['inside']['bandwidth'] / 1e9:.0f} GB/s inside and "
        f"{fabric['between']['bandwidth'] / 1e9:.0f} GB/s between nodes. Plans within 5 % of the fastest stand in "
        f"order of bytes. Least of any algorithm: {size(round(bound['forward']))} + {size(round(bound['backward']))}."
    )
    said = list(ranking["notes"])
    for entry in ranking["refused"]:
        grids = ", ".join("×".join(map(str, grid)) for grid in entry["grids"])
        said.append(f"Not possible: {entry['reason']} (grid {grids}).")
    chosen = ranking["chosen"]["name"]
    if not all(plan["fits"] for _, plan in shown):
        said.insert(0, "! More than the device's memory.")
    said.insert(0, f"Chosen: {chosen}." if ranking["applied"] else f"Best: {chosen}. No recipe applies it here.")
    return [Group(table, Text(caption, "dim")), Text("\n".join(said))]


def _unit(least: float, units: Mapping[str, float]) -> tuple[float, str]:
    """(factor, name) of the largest of `units`, which are in falling order, that `least` reaches; else the smallest."""
    *_, smallest = units
    name = next((n for n, factor in units.items() if least >= factor), smallest)
    return units[name], name


def _sum(unit: tuple[float, str], *terms: float) -> str:
    """Terms in a unit, with three digits at least."""
    numbers = [term / unit[0] for term in terms]
    return " + ".join(f"{n:,.{0 if n >= 99.5 else 1 if n >= 9.95 else 2}f}" for n in numbers)


_HELD = {
    "parameters": "parameters of the whole model",
    "parameters_per_rank": "parameters",
    "cache_per_token": "keys and values, per token",
    "windowed_cache_per_token": "  of it in windows or chunks, which keep no more tokens than they show",
    "states_per_row": "states of recurrent mixers, per sequence",
    "logits_per_token": "logits, per token computed",
    "block_per_token": "values inside the widest block, per token computed",
    "stream_per_token": "residual stream, per token computed",
}


def _memory(held: Mapping[str, int], mesh: Mapping[str, int]) -> Table:
    title = "Memory per rank" if mesh else "Memory"
    table = plain_table(title, "", "bytes", numbers=("bytes",), fold=("", "bytes"))
    for key, label in _HELD.items():
        if (key != "parameters" or mesh) and (key not in ("windowed_cache_per_token", "states_per_row") or held[key]):
            table.add_row(label, size(held[key]))
    if mesh.get("sp", 1) > 1:
        table.caption = f"A rank computes and caches one in {mesh['sp']} tokens."
    return table
