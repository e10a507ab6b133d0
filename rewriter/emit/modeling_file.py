"""What generated modeling files have in common: names, imports, the check of the source, model classes."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from rewriter import ops
from rewriter.emit.naming import identifier
from rewriter.emit.python import LINE_LENGTH, bracketed, quoted
from rewriter.emit.source_classes import Argument, config_module
from rewriter.ir import Program, Source
from rewriter.ir.marks import marks

STANDARD = "standard"  # the kind of a layer that keeps the source's class


@dataclass(frozen=True)
class HuggingFaceFiles:
    """What goes beside the weights.

    `config` is for config.json. `modeling` is the text of the file `modeling_name`; both are None where the source's
    own code still computes the program.
    """

    config: dict[str, Any]
    modeling_name: str | None
    modeling: str | None
    model_type: str


class Names:
    """What the generated classes are called: the source's names with a prefix."""

    def __init__(self, source: Source) -> None:
        self.model_type = f"rewriter_{source.model_type}"
        self.module = f"modeling_{identifier(self.model_type)}"
        self.config = f"Rewriter{source.config_class}"
        self.base = f"Rewriter{source.base_class}"
        self.architecture = f"Rewriter{source.architecture}"


def own_config(source: Source, names: Names) -> dict[str, Any]:
    """The source's config.json with the generated classes instead of its own."""
    config = {k: v for k, v in source_config(source).items() if k != "_name_or_path"}
    if "tie_word_embeddings" in source.config:  # said outright: its default is not the same for every class
        config.setdefault("tie_word_embeddings", source.config["tie_word_embeddings"])
    return config | {
        "architectures": [names.architecture],
        "auto_map": {
            "AutoConfig": f"{names.module}.{names.config}",
            "AutoModel": f"{names.module}.{names.base}",
            "AutoModelForCausalLM": f"{names.module}.{names.architecture}",
        },
        "model_type": names.model_type,
    }


def source_config(source: Source) -> dict[str, Any]:
    """config.json as it lies on disk; what the trace knows of it where there is none, or where it is another one.

    That is where the file configures several models, of which the causal LM is one.
    """
    file = Path(source.path) / "config.json" if source.path else None
    config: dict[str, Any] = json.loads(file.read_text()) if file and file.is_file() else dict(source.config)
    return config if config.get("model_type", source.model_type) == source.model_type else dict(source.config)


def wrapped(text: str, indent: int = 0, first: str = "") -> str:
    """Lines of at most LINE_LENGTH; `first` opens the first one, and the others are as far in."""
    pad = " " * indent
    return textwrap.fill(text, LINE_LENGTH, initial_indent=pad + first, subsequent_indent=pad + " " * len(first))


def imports(
    source: Source, own: Collection[str] = (), standard: Collection[str] = (), others: Collection[str] = ()
) -> str:
    """The import statements; besides the model's classes, `own` from its module, `standard` modules, and `others`."""
    layers = [cls.name for cls in source.layer_classes]
    places: dict[str, set[str]] = {}
    for name in (*layers, source.architecture, source.base_class, *own):
        places.setdefault(source.module_of(name), set()).add(name)
    origin = [f"from {config_module(source)} import {source.config_class}"]
    for module, names in sorted(places.items()):
        classes = sorted(names, key=lambda c: (not c.isupper(), c))  # constants first, as ruff sorts
        line = bracketed(f"from {module} import ", classes, "", 0)
        if "\n" in line:
            line = f"from {module} import (\n" + "".join(f"    {c},\n" for c in classes) + ")"
        origin.append(line)
    mapping = "from transformers.conversion_mapping import (\n    get_checkpoint_conversion_mapping,\n"
    mapping += "    register_checkpoint_conversion_mapping,\n)"
    third_party = ["from transformers import __version__ as transformers_version", mapping, *origin, *others]
    first = [f"import {module}" for module in sorted(["hashlib", "inspect", *standard])]
    return "\n".join([*first, "", "import torch", *third_party])


def source_check(source: Source, children: Collection[str] = ()) -> str:
    """Statements that raise where the source's layers are not those that were read, nor their `children`, classes."""
    known = {cls.name: cls.sha256 for cls in source.layer_classes}
    known |= {name: class_sha256(source, name) for name in children}
    if len(known) == 1:
        return f'''\
# The layers below were printed from this version of {source.layer_class}. Another version may compute something else.
SOURCE_SHA256 = "{source.layer_source_sha256}"
if hashlib.sha256(inspect.getsource({source.layer_class}).encode()).hexdigest() != SOURCE_SHA256:
    raise ImportError(
        f"{source.layer_class} of transformers {{transformers_version}} is not the one that this file was generated "
        "from (transformers {transformers.__version__}). Use that version, or convert the model again with this one."
    )
'''
    rows = "\n".join(f'    {name}: "{digest}",' for name, digest in known.items())
    return f"""\
# The layers below were made for these versions of the source's classes. Other versions may compute something else.
SOURCE_SHA256 = {{
{rows}
}}
for source_class, sha256 in SOURCE_SHA256.items():
    if hashlib.sha256(inspect.getsource(source_class).encode()).hexdigest() != sha256:
        raise ImportError(
            f"{{source_class.__name__}} of transformers {{transformers_version}} is not the one that this file "
            "is for (transformers {transformers.__version__}). Use that version, or convert again with this one."
        )
"""


def class_sha256(source: Source, name: str) -> str:
    """The hash of the source code of a class of the model's module."""
    cls = getattr(importlib.import_module(source.module_of(name)), name)
    return hashlib.sha256(inspect.getsource(cls).encode()).hexdigest()


def docstring(sentences: list[str], indent: int) -> list[str]:
    """Lines of a docstring: one line where it fits, else the first sentence, a blank line and the others."""
    pad = " " * indent
    whole = f'{pad}"""{" ".join(sentences)}"""'
    if len(whole) <= LINE_LENGTH:
        return [whole]
    width = LINE_LENGTH - indent - 6
    first, rest = textwrap.wrap(sentences[0], width), textwrap.wrap(" ".join(sentences[1:]), width)
    body = [*first, *(["", *rest] if rest else [])]
    return [f'{pad}"""{body[0]}', *(f"{pad}{line}" if line else "" for line in body[1:]), f'{pad}"""']


BLEND = '''
def blend(fresh, stale, annealing):
    """(1 - annealing) * fresh + annealing * stale; exactly `fresh` at 0 and `stale` at 1."""
    return torch.lerp(fresh.to(stale.dtype), stale, annealing)
'''

ANNEALED = (
    "A variant for training alone: what a rewired layer reads or adds is blended with what the original reads or adds, "
    "by the layer's attribute `annealing`, from 0.0 (the original) to 1.0 (the rewired layer). It may change at any "
    "step and is no part of a checkpoint: what is trained here loads in the file that was generated without it."
)


def anneals(program: Program, layer: int | None = None) -> bool:
    """Whether a layer, or any, blends what it computes with what the original does."""
    blends = (n for n in program.graph.nodes if n.target is ops.blend)
    return any(layer is None or marks(n).layer == layer for n in blends)


def annealing_attribute(program: Program, layer: int) -> list[str]:
    """The line of a class of layers that declares its `annealing`; none where it has no such thing."""
    return ["    annealing = 1.0"] if anneals(program, layer) else []


def untraced(program: Program, arguments: list[Argument], layer: int = 0) -> list[str]:
    """Arguments that the source's code of a layer reads, but that it was traced without."""
    return [a.name for a in arguments[1:] if a.read and a.name in program.source.absent[layer]]


def standard_kinds(source: Source) -> list[str]:
    """What the classes of the source's layers are called as kinds of layers."""
    return [STANDARD if i == 0 else f"{STANDARD}_{i + 1}" for i in range(len(source.layer_classes))]


def table(source: Source, kinds: Sequence[tuple[str, str]]) -> str:
    """LAYER_CLASSES: the class of every kind of layer; `kinds` are (name, class) of the generated ones."""
    rows = [*zip(standard_kinds(source), [c.name for c in source.layer_classes], strict=True), *kinds]
    return "\n".join(["LAYER_CLASSES = {", *(f"    {quoted(name)}: {cls}," for name, cls in rows), "}"])


def model_classes(source: Source, names: Names, config_fields: Mapping[str, str]) -> list[str]:
    """The config and model classes; `config_fields` are what the config has besides the source's: name → type."""
    fields = "\n".join(f"    {name}: {kind} | None = None" for name, kind in config_fields.items())
    config = f'''
class {names.config}({source.config_class}):
    """{source.config_class} that also names the kind of every decoder layer.

    The model type is not the source's: under that name, loading without trust_remote_code would silently build the
    original wiring.
    """

    model_type = "{names.model_type}"

{fields}
'''
    inner = source.layers.partition(".")[2]
    base = _model_class(names.base, source.base_class, names.config, f"rewire(self, self.{inner})")
    root = f"self.{source.layers.partition('.')[0]}"
    causal = _model_class(
        names.architecture, source.architecture, names.config, f"rewire({root}, self.{source.layers})"
    )
    return [config, base, causal]


def _model_class(name: str, parent: str, config: str, rewire: str) -> str:
    return f"""
class {name}({parent}):
    config_class = {config}
    _no_split_modules = (*({parent}._no_split_modules or ()), *(c.__name__ for c in LAYER_CLASSES.values()))

    def __init__(self, config):
        super().__init__(config)
        {rewire}

    @classmethod
    def is_custom_code(cls):
        return False  # it is initialised as the source is, also the buffers that no checkpoint holds
"""


def conversions(source: Source, names: Names) -> str:
    """Statements that register the source type's conversion of checkpoints for the generated classes."""
    pairs = [
        (source.model_type, names.model_type),
        (source.base_class, names.base),
        (source.architecture, names.architecture),
    ]
    rows = [f"    ({quoted(old)}, {quoted(new)})," for old, new in pairs]
    return "\n".join(
        [
            f"# On disk the tensors are those of a {source.model_type} checkpoint. transformers finds how to convert",
            "# them by model type or class name, so the source's conversions, if any, are registered under ours too.",
            "for source_name, own_name in [",
            *rows,
            "]:",
            "    conversion = get_checkpoint_conversion_mapping(source_name)",
            "    if conversion is not None:",
            "        register_checkpoint_conversion_mapping(own_name, conversion, overwrite=True)",
        ]
    )


def listed_kinds(source: Source, rewritten: Iterable[tuple[str, str]]) -> list[str]:
    """Lines of a header that say what each kind of layer is: the source's own, then (name, description) of others."""
    own = zip(standard_kinds(source), source.layer_classes, strict=True)
    listed = [*((name, f"{cls.name}, unchanged.") for name, cls in own), *rewritten]
    return [
        line
        for name, text in listed
        for line in textwrap.wrap(f"{name}  {text}", LINE_LENGTH, initial_indent="    ", subsequent_indent="        ")
    ]
