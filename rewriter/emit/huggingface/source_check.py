"""Fingerprints of the source's classes, and the versions of transformers that are known to have them.

A fingerprint is of a class's code as a syntax tree, without what changes no result. Trees are printed here and not by
`ast.dump`, whose text differs between versions of Python.

`fingerprints.json` has those of every causal LM's decoder layers, without how children are made (`forward`) and with
all of their code (`whole`), by module and class: one for all versions, or by the version in which it first appeared.
`benchmarks/models/fingerprints.py` writes it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version

from rewriter.common.errors import RewriterError
from rewriter.emit.huggingface.source_classes import config_module
from rewriter.emit.huggingface.verbatim import source_check, source_of
from rewriter.emit.python_source import LINE_LENGTH, bracketed, literal, quoted
from rewriter.ir import Source
from rewriter.tracing.shrink import representatives, shrink

TABLE = Path(__file__).with_name("fingerprints.json")


@functools.cache
def table() -> Mapping[str, Any]:
    """What `fingerprints.json` holds: `versions`, oldest first, `forward` and `whole`."""
    data: Mapping[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return data


def installed_fingerprint(module: str, name: str, forward_only: bool) -> str:
    """The fingerprint of a class as it is installed. Raises RewriterError where its source cannot be read."""
    try:
        return fingerprint(inspect.getsource(importlib.import_module(module)), name, forward_only)
    except (OSError, TypeError, KeyError) as error:
        raise RewriterError(f"the source of {module}.{name} cannot be read: {error}") from error


def versions_with(module: str, name: str, forward_only: bool, digest: str) -> set[str]:
    """The versions of transformers that are known to have a class with this fingerprint."""
    found, current, versions = set(), None, table()["versions"]
    classes = table()["forward" if forward_only else "whole"].get(module.removeprefix("transformers.models."), {})
    recorded = classes.get(name, {})
    since = {versions[0]: recorded} if isinstance(recorded, str) else recorded
    for version in versions:
        current = since.get(version, current)
        if current == digest:
            found.add(version)
    return found


def fingerprint(module: str, name: str, forward_only: bool) -> str:
    """64 bits of what class `name` in `module`, a file's text, computes, with the functions and classes that it names.

    With `forward_only`, classes but bases do not count, nor does how `__init__` makes children that are only called.
    """
    tree = [node for node in ast.walk(ast.parse(module)) if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    defined = {node.name: node for node in reversed(tree)}  # of two of one name the outermost
    if forward_only:
        _leave_out_children(defined[name])
    texts: dict[str, str] = {}
    names = [name]
    while names:
        node = defined[other := names.pop()]
        texts[other] = _printed(node)
        bases = {base.id for base in getattr(node, "bases", ()) if isinstance(base, ast.Name)}
        found = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} & defined.keys() - texts.keys()
        names += [n for n in found if not forward_only or n in bases or isinstance(defined[n], ast.FunctionDef)]
    return hashlib.sha256("\n".join(texts[other] for other in sorted(texts)).encode()).hexdigest()[:16]


def _printed(node: Any) -> str:
    """A syntax tree as text, alike in every version of Python, and where versions of transformers compute alike.

    They differ in the name of the cache, in what it is told of a call, and in decorators. Empty for what does nothing.
    """
    if isinstance(node, list):
        return f"[{','.join(filter(None, map(_printed, node)))}]"
    if isinstance(node, ast.AnnAssign):
        node = ast.Assign([node.target], node.value) if node.value else ast.Pass()
    if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return ""
    if isinstance(node, ast.JoinedStr):  # Python 3.12.0 and 3.12.1 put empty texts after nested fields
        node = ast.JoinedStr([part for part in node.values if getattr(part, "value", None) != ""])
    if not isinstance(node, ast.AST):
        return re.sub("past_key_values?|cache_params|layer_past", "cache", repr(node))
    ignored = ("annotation", "returns", "type_comment", "type_params", "kind", "ctx")
    fields = {field: value for field, value in ast.iter_fields(node) if field not in ignored}
    if "decorator_list" in fields:
        plain = ("deprecate_kwarg", "torch.no_grad", "use_kernel", "force_accelerate_hooks", "auto_docstring")
        fields["decorator_list"] = [d for d in fields["decorator_list"] if not ast.unparse(d).startswith(plain)]
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "update":
        fields["keywords"] = [keyword for keyword in node.keywords if keyword.arg != "kwargs"]
    texts = [f"{field}={_printed(value)}" for field, value in fields.items() if value is not None and value != []]
    return f"{type(node).__name__}({','.join(texts)})"


def _leave_out_children(cls: Any) -> None:
    """Take what only makes children out of the `__init__` of a class: attributes that its other methods only call."""
    methods = {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}
    init = methods.pop("__init__", None)
    nodes = [node for method in methods.values() for node in ast.walk(method)]
    uses = [node for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"]
    if init is None or len(uses) < sum(isinstance(node, ast.Name) and node.id == "self" for node in nodes):
        return  # `self` itself is used, by something that may read anything of it
    called = {node.func for node in nodes if isinstance(node, ast.Call)}

    def assigns(node: ast.AST, left_out: Collection[str]) -> bool:  # nothing else than these
        if isinstance(node, ast.If):
            return all(assigns(part, left_out) for part in node.body + node.orelse)
        return isinstance(node, ast.Assign) and all(ast.unparse(target) in left_out for target in node.targets)

    children = {node.attr for node in uses} - {node.attr for node in uses if node not in called}
    init.body = [node for node in init.body if not assigns(node, {f"self.{name}" for name in children})]
    names = [node for node in ast.walk(init) if isinstance(node, ast.Name)]
    unread = {n.id for n in names} - {n.id for n in names if isinstance(n.ctx, ast.Load)}
    init.body = [node for node in init.body if not assigns(node, unread)]


# --- the code that checks the source


_NOT_SIZES = ("architectures", "auto_map", "dtype", "model_type", "quantization_config", "transformers_version")
_INTRODUCTION = "# What this file was generated from, and the versions of transformers that have it unchanged."


def _small(source: Source, examples: Collection[int], ranks: int) -> tuple[dict[str, Any], list[int] | str]:
    """Settings of a small config of the source's kind, whose model runs, and the layers that it has, `examples` among
    them.

    Where there is no such config, nothing and why: the file then refuses versions that it does not know.
    """
    config_class = getattr(importlib.import_module(config_module(source)), source.config_class)
    try:
        config = config_class.from_dict(dict(source.config))
        kept = sorted({*representatives(config, []), *examples})
        found, usual = shrink(config, kept, ranks).to_diff_dict(), config_class().to_dict()
        found = {k: v for k, v in found.items() if k not in _NOT_SIZES and not k.startswith("_")}
        settings = {k: v for k, v in found.items() if k not in usual or usual[k] != v}
        model_class = getattr(importlib.import_module(source.module_of(source.architecture)), source.architecture)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            model_class(config_class(**settings)).eval()(torch.ones(2, 21, dtype=torch.int64))
        ast.parse(f"{{{_filled(settings)}}}")  # no text was broken at a space
        return settings, kept
    except Exception as error:  # whatever the config's class raises
        return {}, " ".join(f"{type(error).__name__}: {error}".split())


def _filled(settings: Mapping[str, Any]) -> str:
    """A dictionary's items as lines, each item in one where it fits."""
    items = (f"{quoted(name)}: {literal(value)}" for name, value in settings.items())
    text = ", ".join(item.replace(" ", "\0") if len(item) < LINE_LENGTH // 2 else item for item in items)
    pad = " " * 4
    wrapped = textwrap.wrap(text, LINE_LENGTH - 5, break_on_hyphens=False, break_long_words=False)
    return "\n".join(f"{pad}{line}" for line in wrapped).replace("\0", " ")


def checking_code(
    source: Source, read: Sequence[str], caches: bool, ranks: int = 1, bound: Mapping[str, int] | None = None
) -> list[str]:
    """The code that raises where the source's layers are not those that were read.

    `read` is the name of every layer's class as it was read. With `caches`, layers note what children call the cache.
    Where classes of layers compute `ranks` ranks, which `bound` has by name, with a layer that is of each, all code of
    their children counts.
    """
    forward_only = bound is None
    places = {cls.name: cls.module for cls in source.layer_classes}
    known = [
        versions_with(module, name, forward_only, installed_fingerprint(module, name, forward_only))
        for name, module in places.items()
    ]
    versions = sorted(set.intersection(*known) | {transformers.__version__}, key=Version)
    small, kept = _small(source, {*map(read.index, read), *(bound or {}).values()}, ranks)
    constants = [f"MADE_FOR = {quoted(' and '.join(places))}", _filled_text("VERSIONS", ", ".join(versions))]
    check = source_of(source_check.check_source)
    if isinstance(kept, str):
        constants.append(_filled_text("UNTRIED", f"no small model of it: {kept:.200}"))
        untried = source_of(source_check.unknown_difference, {"unknown_difference": "difference"})
        return ["\n".join([_INTRODUCTION, *constants]), check, untried, "check_source()"]
    constants.append("# Settings of a small model with layers of every kind, by which other versions are tried.")
    constants += ["SMALL = {", _filled(small), "}  # fmt: skip"]
    runs = [(name, len(list(run))) for name, run in itertools.groupby(read[layer] for layer in kept)]
    constants.append("# Of each of its layers, the class as it was then.")
    if len(runs) == 1:
        constants.append(f"TRACED = [{runs[0][0]}] * {runs[0][1]}")
    else:
        items = [name if count == 1 else f"*[{name}] * {count}" for name, count in runs]
        constants.append(bracketed("TRACED = [", items, "]", 0))
    if bound is not None:
        tried = [f"({kept.index(example)}, {name})" for name, example in bound.items()]
        constants.append(bracketed("BOUND = [", tried, "]", 0))
    names = {"SourceConfig": source.config_class, "SourceModel": source.architecture}
    absent = ["name_caches"] * (not caches) + ["ranks_differ"] * forward_only
    tries = [source_of(source_check.difference, names, absent), source_of(source_check.logits_of)]
    if not forward_only:
        tries += [source_of(source_check.ranks_differ), source_of(source_check.ranks_add_up)]
        tries += [source_of(source_check.ranks_outputs), source_of(source_check.note_call)]
    tries = [text.replace("model.layers", f"model.{source.layers}") for text in tries]
    return ["\n".join([_INTRODUCTION, *constants]), check, *tries, "check_source()"]


def _filled_text(name: str, text: str) -> str:
    """An assignment of `text`, in as many lines as it needs."""
    if len(line := f"{name} = {quoted(text)}") <= LINE_LENGTH:
        return line
    lines = textwrap.wrap(text, LINE_LENGTH - 8, drop_whitespace=False)
    return "\n".join([f"{name} = (", *(f"    {quoted(line)}" for line in lines), ")"])
