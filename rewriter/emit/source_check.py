"""The end of a generated modeling file: the classes that it was made for, and what it does where others are found."""

from __future__ import annotations

import ast
import importlib
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import transformers
from packaging.version import Version

from rewriter.emit.python_source import LINE_LENGTH, bracketed, literal, quoted
from rewriter.emit.source_classes import config_module
from rewriter.emit.source_fingerprints import installed_fingerprint, versions_with
from rewriter.emit.verbatim import source_check, source_of
from rewriter.ir import Source
from rewriter.tracing.shrink import representatives, shrink

_NOT_SIZES = ("architectures", "auto_map", "dtype", "model_type", "quantization_config", "transformers_version")
_INTRODUCTION = "# The layers above were made for this class, and versions of transformers that are known to have it."


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
    constants.append("# A model of these settings has few and small layers of every kind.")
    constants += ["SMALL = {", _filled(small), "}  # fmt: skip"]
    constants.append(bracketed("READ = [", [read[layer] for layer in kept], "]", 0))
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
