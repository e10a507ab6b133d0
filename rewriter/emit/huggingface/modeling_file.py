"""The generated modeling file of a Hugging Face model: its header, imports, layers, and the classes of the model."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import transformers

from rewriter.common.packages import VERSION
from rewriter.common.text_settings import stream_width
from rewriter.emit.huggingface.layers import PrintedLayer, print_layers
from rewriter.emit.huggingface.per_rank import PerRankModule
from rewriter.emit.huggingface.source_check import checking_code
from rewriter.emit.huggingface.source_classes import config_module, layer_arguments, owner_of_layers
from rewriter.emit.huggingface.verbatim import model, per_rank, phases, source_of
from rewriter.emit.python_source import (
    LINE_LENGTH,
    bracketed,
    docstring,
    filled,
    free_name,
    identifier,
    literal,
    quoted,
)
from rewriter.ir import Leaf, Program, Source, args_of, ops
from rewriter.ir.carrying import stream_count
from rewriter.ir.marks import marks
from rewriter.ir.phases import REWIRED, prompt_phase
from rewriter.ir.shapes import is_shape, stream_shape

STANDARD = "standard"  # the kind of a layer that keeps the source's class
_REWIRED = (
    "Parameters, their names and everything around the decoder layers are the source's. `config.rewriter_layers` "
    "names the kind of every layer:"
)
_PHASED = (
    "Tokens of a prompt are rewired, but its first and last ones (`config.rewriter_phase` says how many); those and "
    "all that is generated are exact, computed as in the original. The argument `rewired` of the model's forward says "
    "which tokens of a call are which; by default the rows of a call with nothing in its cache are prompts."
)
_BOUND = (
    "Sharded over {ranks} ranks, some all-reduces are left out, and each rank then has its own residual. Here all "
    "{ranks} ranks are computed on one device: a value that differs by rank is [B, S, RANKS, D], any other [B, S, D]. "
    "An all-reduce is a sum over the ranks.",
    "The children of a layer are the source's. Inside attention and MLP, the parts of all ranks together are the heads "
    "and channels of the full module, so only the projections that read a rank's own residual (PerRankColumn) or "
    "return its partial sums (PerRankRow) differ. `config.rewriter_layers` names the kind of every layer:",
)


@dataclass(frozen=True)
class PrintedKind:
    """A kind of decoder layer of the generated file: its name in the config, its class, one layer that is of it, and
    `what` it does in sentences."""

    name: str
    class_name: str
    layer: PrintedLayer
    example: int
    what: tuple[str, ...]


class ModelNames:
    """Names of the generated classes: the source's names with a prefix."""

    def __init__(self, source: Source) -> None:
        self.model_type = f"rewriter_{source.model_type}"
        self.module = f"modeling_{identifier(self.model_type)}"
        self.config = f"Rewriter{source.config_class}"
        self.base = f"Rewriter{source.base_class}"
        self.architecture = f"Rewriter{source.architecture}"


def modeling_file(program: Program, kinds: Sequence[PrintedKind], names: ModelNames, bound: bool) -> str:
    """The text of the file. With `bound`, it computes all ranks that the function of `program` is bound to."""
    source = program.source
    modules = [m for kind in kinds for m in kind.layer.modules.values()]
    constants = [f"RANKS = {program.mesh.get('tp')}  # that this model's function is bound to"] * bound
    read = _as_read(program)
    caches = any(kind.layer.arguments.cache for kind in (*kinds, *read))
    phased = prompt_phase(program) is not None
    constants += [f"CACHE_NAMES = {literal(phases.CACHE_NAMES)}"] * (caches or phased)
    classes = {kind.class_name: kind.example for kind in kinds if kind.layer.modules} if bound else None
    check = checking_code(source, [kind.class_name for kind in read], caches, program.mesh.get("tp", 1), classes)
    if any("TRACED = [" in part for part in check):
        check = [*(_layer_class(program, kind, False) for kind in {k.class_name: k for k in read}.values()), *check]
    parts = [
        _header(program, kinds, names, bound),
        "\n\n".join([_imports(source, modules, check, caches, phased), *constants]),
        *(_per_rank_code(modules) if bound else ()),
        *(source_of(part) for part in (model.take_cache, model.name_caches) if caches),
        *(_layer_class(program, kind, bound) for kind in kinds),
        _table(source, kinds),
        *_rewiring(program, bound, caches, phased),
        *_model_classes(source, names, bound, phased, stream_count(program)),
        _conversions(source, names),
        *check,
    ]
    header, *code = (part.strip("\n") for part in parts)
    return header + "\n\n" + "\n\n\n".join(code) + "\n"


def _header(program: Program, kinds: Sequence[PrintedKind], names: ModelNames, bound: bool) -> str:
    source, ranks = program.source, program.mesh.get("tp")
    recipe = (program.recipe or {}).get("name")
    by = f"recipe {recipe}" if recipe else "passes " + (", ".join(r.name for r in program.history) or "by hand")
    what = f"whose function is bound to {ranks} ranks (tp={ranks})" if bound else "with some decoder layers rewired"
    lines = [
        f'"""{names.architecture}: {source.architecture} {what}.',
        "",
        filled(
            f"Generated by rewriter {VERSION} ({by}) from a {source.model_type} checkpoint, "
            f"with transformers {transformers.__version__}."
        ),
    ]
    lines += [filled(f"{entry.name}({entry.arguments()}): {entry.summary}", 4) for entry in program.history]
    texts = [text.format(ranks=ranks) for text in _BOUND] if bound else [_REWIRED]
    for text in [*[_PHASED] * (prompt_phase(program) is not None), *texts]:
        lines += ["", filled(text)]
    lines.append("")
    own = zip(standard_kinds(source), source.layer_classes, strict=True)
    listed = [(name, f"{cls.name}, unchanged.") for name, cls in own]
    listed += [(kind.name, f"{kind.class_name}: {' '.join(kind.what)}") for kind in kinds]
    for name, text in listed:
        lines += textwrap.wrap(f"{name}  {text}", LINE_LENGTH, initial_indent="    ", subsequent_indent="        ")
    return "\n".join(lines).replace("\\", "\\\\") + '\n"""'


def _imports(source: Source, modules: Sequence[PerRankModule], check: Sequence[str], caches: bool, phased: bool) -> str:
    """The import statements: of the model's classes, and of what `modules`, the `check` of the source, layers that
    note how children call the cache and models that tell tokens apart need."""
    layers = [cls.name for cls in source.layer_classes]
    norms = [m.kind for m in modules if m.role == "Norm" and m.kind != "LayerNorm"]
    places: dict[str, set[str]] = {}
    for name in (*layers, source.architecture, source.base_class, *norms):
        places.setdefault(source.module_of(name), set()).add(name)
    origin = [f"from {config_module(source)} import {source.config_class}"]
    for module, names in sorted(places.items()):
        classes = sorted(names, key=lambda c: (not c.isupper(), c))  # constants first, as ruff sorts
        line = f"from {module} import {', '.join(classes)}"
        if len(line) > LINE_LENGTH:
            line = f"from {module} import (\n" + "".join(f"    {c},\n" for c in classes) + ")"
        origin.append(line)
    mapping = "from transformers.conversion_mapping import (\n    get_checkpoint_conversion_mapping,\n"
    mapping += "    register_checkpoint_conversion_mapping,\n)"
    others = ["from transformers.pytorch_utils import Conv1D"] * any(m.kind == "Conv1D" for m in modules)
    used = "\n".join(check)
    copies = any(m.role in ("Norm", "Experts") for m in modules) or "copy." in used
    standard = {"copy": copies, "functools": phased or "functools." in used, "inspect": phased or caches}
    standard["warnings"] = "warnings." in used
    lines = [f"import {name}" for name, wanted in standard.items() if wanted]
    lines += [""] * bool(lines) + ["import torch", "from transformers import __version__ as transformers_version"]
    return "\n".join([*lines, mapping, *origin, *others])


# --- layers


def _layer_class(program: Program, kind: PrintedKind, bound: bool) -> str:
    source, layer = program.source.of_layer(kind.example), kind.layer
    arguments = [a for a in layer_arguments(source) if a.name in layer.arguments.named]
    lines = [f"class {kind.class_name}({source.layer_class}):", *docstring(kind.what, 4)]
    if kind.name:
        widths = (("takes", layer.widths_taken, "from"), ("gives", layer.widths_given, "to"))
        unit = "widths of the values" if bound else "hidden-size vectors per token"
        lines.append("")
        for name, of, side in widths:
            other = "the layer before" if side == "from" else "the next layer"
            lines.append(f"    {name} = {_widths(of) if bound else len(of)}  # {unit} {side} {other}")
    if layer.modules:
        lines.append("    per_rank_modules = (")
        for path, module in layer.modules.items():
            options = ", ".join(f"{quoted(name)}: {value}" for name, value in module.options)
            lines.append(bracketed("(", [quoted(path), module.class_name, f"{{{options}}}"], "),", 8))
        lines.append("    )")
    if layer.groups:
        groups = ", ".join(f"({quoted(path)}, {count})" for path, count in layer.groups.items())
        groups += "," * (len(layer.groups) == 1)
        lines.append(f"    key_value_groups = ({groups})  # ranks hold more key/value heads than the source")
    parameters = [
        "self",
        *map(str, arguments),
        *["*", REWIRED] * layer.rewires,
        *["**kwargs"] * (source.layer_var_kwargs or layer.arguments.takes_cache),
    ]
    lines += ["", bracketed("def forward(", parameters, "):", 4)]
    for argument in arguments[1:]:
        # the source's code reads it, but was traced without it
        if argument.read and argument.name in program.source.absent[kind.example]:
            lines.append(f"        if {argument.name} is not None:")
            lines.append(f'            raise ValueError("{argument.name}: {kind.class_name} was generated without it")')
    lines.append(layer.text(source.returns[kind.example], bound))
    return "\n".join(lines)


def _widths(widths: Sequence[int]) -> str:
    inner = ", ".join("1" if width == 1 else "RANKS" for width in widths)
    return f"({inner},)" if len(widths) == 1 else f"({inner})"


def standard_kinds(source: Source) -> list[str]:
    """Names of the source's classes of layers as kinds of layers."""
    return [STANDARD if i == 0 else f"{STANDARD}_{i + 1}" for i in range(len(source.layer_classes))]


def _table(source: Source, kinds: Sequence[PrintedKind]) -> str:
    """LAYER_CLASSES: the class of every kind of layer."""
    rows = [*zip(standard_kinds(source), [c.name for c in source.layer_classes], strict=True)]
    rows += [(kind.name, kind.class_name) for kind in kinds]
    return "\n".join(
        [
            "# by kind, as config.rewriter_layers names them",
            "LAYER_CLASSES = {",
            *(f"    {quoted(name)}: {cls}," for name, cls in rows),
            "}",
        ]
    )


def _as_read(program: Program) -> list[PrintedKind]:
    """For every layer, the kind that is printed as the source wrote it."""
    source, layers = program.source, print_layers(program.origin or program)
    kinds: list[PrintedKind] = []
    for index, layer in enumerate(layers):
        kind = next((k for k in kinds if k.layer == layer and source.alike(k.example, index)), None)
        if kind is None:
            name = source.of_layer(index).layer_class
            class_name = free_name(f"Traced{name}", {k.class_name for k in kinds}.__contains__)
            kind = PrintedKind("", class_name, layer, index, (f"{name} as it was when this file was generated.",))
        kinds.append(kind)
    return kinds


# --- modules that compute per rank


def _per_rank_code(modules: Sequence[PerRankModule]) -> list[str]:
    """Packing, what each role of modules does, the classes by role and kind, and how they replace the source's."""
    roles = {m.role_class for m in modules}
    factors = {role: classes for role, classes in per_rank.LORA_FACTORS.items() if role.__name__ in roles}
    # Of each projection's role also the Linear, for the factors of an adapter.
    classes = {(m.role_class, m.kind): m.class_name for m in modules if m.kind}
    classes |= {(role.__name__, "Linear"): f"{role.__name__}Linear" for role in factors}
    parts: list[str] = [source_of(per_rank.unpack), source_of(per_rank.pack)]
    if weights := [weight for kind, weight in _WEIGHTS.items() if any(k == kind for _, k in classes)]:
        text = source_of(per_rank.output_rows)
        parts.append(text if len(weights) == 2 else f"{text.rpartition('return')[0]}return {weights[0]}")
    all_roles = (*per_rank.LORA_FACTORS, per_rank.PerRankExperts, per_rank.PerRankNorm)
    parts += [source_of(role) for role in all_roles if role.__name__ in roles]
    if roles & {"PerRankNorm", "PerRankExperts"}:
        parts.append(source_of(per_rank.unbound))
    for (role, kind), name in sorted(classes.items()):
        parent = f"torch.nn.{kind}" if kind in ("Linear", "LayerNorm") else kind
        parts.append(f"class {name}({role}, {parent}):\n    pass")
    absent = {role.__name__ for role in all_roles} - roles
    parts += [source_of(per_rank.use_per_rank_modules, absent=absent), source_of(per_rank.require_per_rank_modules)]
    if per_rank.PerRankColumn in factors:
        parts.append(source_of(per_rank.PerRankRead))
    rows = [f"{role.__name__}: ({', '.join(map(_class_path, pair))})" for role, pair in factors.items()]
    comment = "# The classes of a LoRA's two factors, by what their product is added to.\n"
    parts.append(comment + bracketed("LORA_FACTORS = {", rows, "}", 0))
    return [*parts, source_of(per_rank.lora_computes_per_rank)]


_WEIGHTS = {"Linear": "projection.weight", "Conv1D": "projection.weight.t()"}


def _class_path(cls: type) -> str:
    return f"torch.nn.{cls.__name__}" if cls.__module__.startswith("torch.") else cls.__name__


# --- the model


def _rewiring(program: Program, bound: bool, caches: bool, phased: bool) -> list[str]:
    """The functions that give a model's layers their classes."""
    drops = bound and _drops_out(program)
    absent = ["refuse_dropout"] * (not drops) + ["RANKS", "use_per_rank_modules", "refuse_engines"] * (not bound)
    absent += ["tell_layers"] * (not phased)
    widths = {"ALONE": "(1,)", "vectors": "sum"} if bound else {"ALONE": "1", "vectors": "int"}
    names = {"SourceModel": program.source.base_class, **widths}
    narrow = per_rank.narrow_hidden_states if bound else model.narrow_hidden_states
    rewire = source_of(model.rewire, names, absent)
    if caches:
        own = "        layer.__class__ = layer_class\n"
        rewire = rewire.replace(own, f"{own}        name_caches(layer)\n")
    narrowing, several = source_of(narrow), _vectors(program)
    if several > 1:
        size = "config.get_text_config().hidden_size"
        rewire = rewire.replace(size, f"VECTORS * {size}")
        narrowing = narrowing.replace("output[0].shape[-1]", "VECTORS * output[0].shape[-1]")
        rewire = f"VECTORS = {several}  # of the hidden size, that the residual stream of a token is\n\n\n{rewire}"
    parts = [rewire, source_of(model.is_missing), source_of(model.require_packed_width), narrowing]
    parts += [source_of(per_rank.refuse_engines)] * bound
    if phased:
        told = (phases.tell_layers, phases.tell_rewired, phases.check_rewired, phases.leave_out_rewired)
        which = (phases.cached_tokens, phases.rewired_tokens, phases.with_rewired, phases.PhasedGeneration)
        parts += [source_of(part) for part in (*told, *which)]
    return [*parts, *[source_of(per_rank.refuse_dropout)] * drops]


def _vectors(program: Program) -> int:
    """The width of the residual stream, in vectors of the hidden size."""
    shape, width = stream_shape(program), stream_width(program.source.config)
    return int(shape[-1]) // width if is_shape(shape) and isinstance(shape[-1], int) and width else 1


def _drops_out(program: Program) -> bool:
    """True if the source's layers have dropout outside of their modules: a sharded wiring has none."""
    origin = program.origin or program
    for node in origin.graph.nodes:
        if marks(node).layer is None:
            continue
        if node.target is ops.dropout and args_of(node)[1]:
            return True
        module = origin.modules.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, Leaf) and module.kind == "Dropout" and module.options.get("p", 1.0):
            return True
    return False


def _model_classes(source: Source, names: ModelNames, bound: bool, phased: bool, streams: int) -> list[str]:
    """The config and model classes."""
    own = {"SourceConfig": source.config_class, "OwnConfig": names.config, "own_model_type": names.model_type}
    config = source_of(model.OwnConfig, own)
    if bound:
        config += "\n    rewriter_ranks: int | None = None"
    if streams > 1:
        config += "\n    rewriter_streams: int | None = None  # vectors of the hidden size that are the residual stream"
    if phased:
        config += "\n    rewriter_phase: dict[str, int] | None = None  # how many tokens at a prompt's ends stay exact"
    if source.on_load:
        config += "\n\n    def validate(self):\n"
        config += (
            '        """Nothing: SourceConfig wants heads that divide the width, and they have a size of their own."""'
        )
        config = config.replace("SourceConfig", source.config_class)
    base = source_of(model.OwnModel, own | {"SourceModel": source.base_class, "OwnModel": names.base})
    causal = source_of(model.OwnModel, own | {"SourceModel": source.architecture, "OwnModel": names.architecture})
    rewire = "rewire(self, self.layers)"
    if source.base_class == source.architecture:  # a wrapper whose parts have configs of their own
        place = f"rewire(self.{source.layers.rpartition('.')[0]}, self.{source.layers}, self.config)"
        return [config, causal.replace(rewire, place)]
    if phased:
        line = f"    config_class = {names.config}\n"
        base = base.replace(line, f"{line}    forward = with_rewired({source.base_class}.forward)\n")
        causal = causal.replace(line, f"{line}    forward = with_rewired({source.architecture}.forward)\n")
        causal = causal.replace(f"({source.architecture})", f"(PhasedGeneration, {source.architecture})", 1)
    owner, root = owner_of_layers(source), source.layers.partition(".")[0]

    def rewired(model: str) -> str:
        return f"rewire({model}{owner.removeprefix(root)}, {model}{source.layers.removeprefix(root)})"

    return [config, base.replace(rewire, rewired("self")), causal.replace(rewire, rewired(f"self.{root}"))]


def _conversions(source: Source, names: ModelNames) -> str:
    """Statements that register the source type's conversion of checkpoints for the generated classes."""
    own = {source.base_class: names.base, source.architecture: names.architecture}
    pairs = [(source.model_type, names.model_type), *own.items()]
    rows = "\n".join(f"    ({quoted(old)}, {quoted(new)})," for old, new in pairs)
    return f"""\
# On disk the tensors are those of a {source.model_type} checkpoint. transformers finds how to convert
# them by model type or class name, so the source's conversions, if any, are registered under ours too.
for source_name, own_name in [
{rows}
]:
    conversion = get_checkpoint_conversion_mapping(source_name)
    if conversion is not None:
        register_checkpoint_conversion_mapping(own_name, conversion, overwrite=True)
"""
