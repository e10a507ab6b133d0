"""The code by which a generated file checks that the source's layers are those that it was made from.

They are, in the version of transformers that it was made with. Any other version is tried: the file holds the layers as
they were read, and settings of a small model in which the installed ones are compared with them.
"""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import pprint
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import transformers

from rewriter.common.errors import RewriterError
from rewriter.emit.huggingface.source_classes import config_module
from rewriter.emit.huggingface.verbatim import source_check, source_of
from rewriter.emit.python_source import LINE_LENGTH, bracketed, quoted
from rewriter.ir import Source
from rewriter.ir.phases import REWIRED
from rewriter.tracing.shrink import representatives, shrink

_NOT_SIZES = ("architectures", "auto_map", "dtype", "model_type", "quantization_config", "transformers_version")
_INTRODUCTION = "# What this file was generated from."


def _small(source: Source, examples: Collection[int], ranks: int) -> tuple[str, list[int]]:
    """Settings of a small config of the source's kind, as Python, whose model runs, and the layers that it has,
    `examples` among them. Raises what the config's class raises where there is no such config."""
    config_class = getattr(importlib.import_module(config_module(source)), source.config_class)
    config = config_class.from_dict(dict(source.config))
    kept = sorted({*representatives(config, []), *examples})
    small, usual = shrink(config, kept, ranks).to_diff_dict(), config_class().to_dict()
    small = {k: v for k, v in small.items() if k not in _NOT_SIZES and not k.startswith("_")}
    settings = {k: v for k, v in small.items() if k not in usual or usual[k] != v}
    model_class = getattr(importlib.import_module(source.module_of(source.architecture)), source.architecture)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        model_class(config_class(**settings)).eval()(torch.ones(2, 21, dtype=torch.int64))
    items = pprint.pformat(settings, width=LINE_LENGTH - 20, sort_dicts=False).replace("'", '"')[1:-1]
    text = "{\n    " + items.replace("\n ", "\n    ") + "\n}"
    ast.literal_eval(text)
    return text, kept


def checking_code(
    source: Source, read: Sequence[str], caches: bool, ranks: int = 1, bound: Mapping[str, int] | None = None
) -> list[str]:
    """The code that raises where the source's layers are not those that were read.

    `read` is the name of every layer's class as it was read. With `caches`, layers note what children call the cache.
    `bound` has the classes of layers that compute `ranks` ranks, by name, with a layer that is of each. Where there is
    no small model of the source's kind, the code warns of other versions.
    """
    names = " and ".join(cls.name for cls in source.layer_classes)
    constants = [_INTRODUCTION, f"MADE_FOR = {quoted(names)}", f"MADE_WITH = {quoted(transformers.__version__)}"]
    try:
        small, kept = _small(source, {*map(read.index, read), *(bound or {}).values()}, ranks)
    except Exception as error:  # the code of a config's class raises what it likes
        why = " ".join(f"# No small model of it: {type(error).__name__}: {error}".split())
        constants.append(why[:LINE_LENGTH])
        untried = source_of(source_check.check_untried, {"check_untried": "check_source"})
        return ["\n".join(constants), untried, "check_source()"]
    constants += ["# Settings of a small model with layers of every kind, by which other versions are tried."]
    constants += [f"SMALL = {small}  # fmt: skip", "# Of each of its layers, the class as it was then."]
    runs = [(name, len(list(run))) for name, run in itertools.groupby(read[layer] for layer in kept)]
    if len(runs) == 1:
        constants.append(f"TRACED = [{runs[0][0]}] * {runs[0][1]}")
    else:
        items = [name if count == 1 else f"*[{name}] * {count}" for name, count in runs]
        constants.append(bracketed("TRACED = [", items, "]", 0))
    own = {"SourceConfig": source.config_class, "SourceModel": source.architecture}
    absent = ["name_caches"] * (not caches) + ["ranks_differ"] * (bound is None)
    tries = [source_of(source_check.check_source), source_of(source_check.difference, own, absent)]
    tries.append(source_of(source_check.logits_of))
    if bound is not None:
        tried = [f"({kept.index(example)}, {name})" for name, example in bound.items()]
        constants.append(bracketed("BOUND = [", tried, "]", 0))
        tries += [source_of(source_check.ranks_differ), source_of(source_check.ranks_add_up)]
        tries += [source_of(source_check.ranks_outputs), source_of(source_check.note_call)]
    tries = [text.replace("model.layers", f"model.{source.layers}") for text in tries]
    return ["\n".join(constants), *tries, "check_source()"]


def require_handed_on(source: Source) -> None:
    """Raise RewriterError unless the source's model hands on to every decoder layer a keyword that it does not know.

    A small model of its kind is run; where there is none, layers that are not told which tokens are rewired raise
    TypeError.
    """
    config_class = getattr(importlib.import_module(config_module(source)), source.config_class)
    model_class = getattr(importlib.import_module(source.module_of(source.architecture)), source.architecture)
    told: dict[int, bool] = {}

    def note(index: int, layer: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        told[index] = REWIRED in kwargs
        return args, {name: value for name, value in kwargs.items() if name != REWIRED}

    refused: Exception | None = None
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        try:
            config = config_class.from_dict(dict(source.config))
            model = model_class(shrink(config, representatives(config, []), 1)).eval()
            layers = model.get_submodule(source.layers)
            ids = torch.ones(1, 5, dtype=torch.int64)
            model(ids)
        except Exception:  # the code of a config's class raises what it likes
            return
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(functools.partial(note, index), with_kwargs=True)
        try:
            model(ids, **{REWIRED: torch.zeros(1, 5, dtype=torch.bool)})
        except TypeError as error:
            refused = error
    if refused is not None or not all(told.values()):
        why = f"it raises TypeError: {refused}" if refused is not None else "its layers do not get it"
        raise RewriterError(
            f"{source.architecture} does not hand on the argument `{REWIRED}`, which tells its layers the rewired "
            f"tokens ({why}): a checkpoint of it cannot rewire the prompt alone. Leave out phase: prompt"
        )
