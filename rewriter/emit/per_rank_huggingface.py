"""The Hugging Face side of a program that is bound to its ranks: a model that computes every rank's lane on one device.

As in `huggingface`, only the decoder layers are generated. Parameters keep the source's names and shapes, but for norms
with weights per rank, which hold the weights of all ranks one after the other.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

import transformers

from rewriter import ops
from rewriter.common.version import VERSION
from rewriter.emit import modeling_file as file
from rewriter.emit.layers import print_layers
from rewriter.emit.naming import camel
from rewriter.emit.per_rank_layers import LaneLayer, print_lane_layers
from rewriter.emit.per_rank_modules import LaneModule
from rewriter.emit.per_rank_support import lane_class, support
from rewriter.emit.python import bracketed, quoted
from rewriter.emit.reduction_pattern import BlockMode, described, layer_modes, pattern_table
from rewriter.emit.source_classes import layer_arguments, require_importable, returned_values
from rewriter.ir import Leaf, Program, Source, args_of
from rewriter.ir.marks import marks


@dataclass(frozen=True)
class _Kind:
    """A kind of decoder layer of the generated file; `modes` are those of its blocks, `example` is one layer of it."""

    name: str
    class_name: str
    layer: LaneLayer
    modes: tuple[BlockMode, ...]
    example: int
    touched: bool


def emit_lanes(program: Program) -> file.HuggingFaceFiles:
    """The files that make `from_pretrained(DIR, trust_remote_code=True)` compute all lanes of `program` on one device.

    `program` is sharded, with its reductions as they are (not scheduled). config.json names the ranks
    (`rewriter_ranks`) and what became of every reduction (`rewriter_pattern`).

    Raises RewriterError when the source's classes are not part of transformers, and where a child of a layer cannot
    compute lanes in the source's own code (the message names it).
    """
    source = program.source
    require_importable(source)
    kinds, assignment = _kinds(program)
    names = file.Names(source)
    config = file.own_config(source, names) | {
        "rewriter_layers": assignment,
        "rewriter_pattern": pattern_table(program),
        "rewriter_ranks": program.mesh["tp"],
    }
    modeling = _modeling(program, kinds, names)
    return file.HuggingFaceFiles(config, f"{names.module}.py", modeling, names.model_type)


def _kinds(program: Program) -> tuple[list[_Kind], list[str]]:
    """(the kinds of rewired layers in order of appearance, the kind's name of every layer)."""
    source = program.source
    originals = print_layers(program.origin or program)
    modes = layer_modes(program)
    kinds: list[_Kind] = []
    assignment = []
    for index, layer in enumerate(print_lane_layers(program)):
        original = originals[index]
        touched = bool(layer.modules) or (layer.statements, layer.gives[0]) != (original.statements, original.gives[0])
        if not touched and layer.plain:
            assignment.append(file.standard_kinds(source)[source.layer_kinds[index]])
            continue
        kind = next((k for k in kinds if k.layer == layer and source.alike(k.example, index)), None)
        if kind is None:
            wish = _kind_name(modes[index], touched, layer)
            taken = [k.name for k in kinds]
            name = wish if wish not in taken else next(n for i in range(2, 10**6) if (n := f"{wish}_{i}") not in taken)
            kind = _Kind(name, camel(name) + source.of_layer(index).layer_class, layer, modes[index], index, touched)
            kinds.append(kind)
        assignment.append(kind.name)
    return kinds, assignment


def _kind_name(modes: Sequence[BlockMode], touched: bool, layer: LaneLayer) -> str:
    if not touched:
        ends = [file.STANDARD if widths == (1,) else "packed" for widths in (layer.widths_taken, layer.widths_given)]
        return "_to_".join(ends)
    words = list(dict.fromkeys(mode.word for mode in modes))
    return "_".join(words) if len(words) == 1 else "_".join(mode.word for mode in modes)


# --- the modeling file -----------------------------------------------------------------------------------------------


def _modeling(program: Program, kinds: list[_Kind], names: file.Names) -> str:
    source = program.source
    modules = [m for kind in kinds for m in kind.layer.modules.values()]
    children = _children(source, kinds)
    parts = [
        _header(program, kinds, names),
        f"{_imports(program, modules, children)}\n\n{_lanes(program)}\n\n{file.source_check(source, children)}",
        *support(modules),
        *[file.BLEND] * file.anneals(program),
        *(_layer_class(program, kind) for kind in kinds),
        file.table(source, [(kind.name, kind.class_name) for kind in kinds]),
        _rewire(program),
        *file.model_classes(source, names, _CONFIG_FIELDS),
        file.conversions(source, names),
    ]
    header, *code = (part.strip("\n") for part in parts)
    return header + "\n\n" + "\n\n\n".join(code) + "\n"


_CONFIG_FIELDS = {
    "rewriter_layers": "list[str]",
    "rewriter_pattern": "list[dict[str, str]]",
    "rewriter_ranks": "int",
}


def _header(program: Program, kinds: list[_Kind], names: file.Names) -> str:
    source, ranks = program.source, program.mesh["tp"]
    recipe = (program.recipe or {}).get("name")
    by = f"recipe {recipe}" if recipe else "passes " + (", ".join(r.name for r in program.history) or "by hand")
    lines = [
        f'"""{names.architecture}: {source.architecture} whose function is bound to {ranks} ranks (tp={ranks}).',
        "",
        file.wrapped(
            f"Generated by rewriter {VERSION} ({by}) from a {source.model_type} checkpoint, "
            f"with transformers {transformers.__version__}."
        ),
    ]
    for entry in program.history:
        lines.append(file.wrapped(f"{entry.name}({entry.arguments()}): {entry.summary}", 4))
    about = [
        f"Sharded over {ranks} ranks, some all-reduces are left out, and what a rank computes then is its own. Here "
        f"every rank is a lane, and all {ranks} are computed on one device: a value that differs by rank is "
        "[B, S, LANES, D], any other [B, S, D]. An all-reduce is a sum over the lanes.",
        "The children of a layer are the source's. Inside attention and MLP, the parts of all lanes together are the "
        "heads and channels of the whole module, so only the projections that read lanes (LaneEntry) or return their "
        "partial sums (LaneExit) differ. `config.rewriter_layers` names the kind of every layer:",
    ]
    for text in [*about, *[file.ANNEALED] * file.anneals(program)]:
        lines += ["", *file.wrapped(text).splitlines()]
    lines.append("")
    rewritten = [(kind.name, f"{kind.class_name}: {' '.join(_what(program, kind))}") for kind in kinds]
    lines += file.listed_kinds(source, rewritten)
    return "\n".join(lines).replace("\\", "\\\\") + '\n"""'


def _what(program: Program, kind: _Kind) -> list[str]:
    """What a kind of layer does, a sentence per block."""
    if not kind.touched:
        name = program.source.of_layer(kind.example).layer_class
        return [f"Computes what {name} computes, beside values that it passes on."]
    return [described(mode) for mode in kind.modes]


def _imports(program: Program, modules: Sequence[LaneModule], children: Sequence[str]) -> str:
    source = program.source
    norms = {m.kind for m in modules if m.role == "Norm" and m.kind != "LayerNorm"}
    standard = ["copy"] * any(m.role in ("Norm", "Experts") for m in modules)
    others = ["from transformers.pytorch_utils import Conv1D"] * any(m.kind == "Conv1D" for m in modules)
    return file.imports(source, {*norms, *children}, standard, others)


def _children(source: Source, kinds: Sequence[_Kind]) -> list[str]:
    """The source's classes whose code was found to do the right thing when only its projections know lanes."""
    module = importlib.import_module(source.module)
    found = {name for kind in kinds for name in kind.layer.classes}
    return sorted(name for name in found if hasattr(module, name))


def _lanes(program: Program) -> str:
    return f"LANES = {program.mesh['tp']}  # the ranks that this model's function is bound to"


def _layer_class(program: Program, kind: _Kind) -> str:
    source = program.source.of_layer(kind.example)
    arguments = layer_arguments(source)
    parameters = [str(a) for a in arguments]
    if source.layer_var_kwargs:
        parameters.append("**kwargs")
    lines = [f"class {kind.class_name}({source.layer_class}):"]
    lines += file.docstring(_what(program, kind), 4)
    lines += ["", f"    takes = {_tuple(kind.layer.widths_taken)}", f"    gives = {_tuple(kind.layer.widths_given)}"]
    lines += file.annealing_attribute(program, kind.example)
    if kind.layer.modules:
        lines.append("    lane_modules = (")
        for path, module in kind.layer.modules.items():
            options = ", ".join(f"{quoted(name)}: {value}" for name, value in module.options)
            items = [quoted(path), lane_class(module), f"{{{options}}}"]
            lines.append(bracketed("(", items, "),", 8))
        lines.append("    )")
    if kind.layer.groups:
        groups = "".join(f"({quoted(path)}, {count}), " for path, count in kind.layer.groups.items()).rstrip(" ")
        groups = groups if len(kind.layer.groups) == 1 else groups.rstrip(",")
        lines.append(f"    key_value_groups = ({groups})  # lanes hold more key/value heads than the source")
    lines += ["", bracketed("def forward(", ["self", *parameters], "):", 4)]
    for name in file.untraced(program, arguments, kind.example):
        lines.append(f"        if {name} is not None:")
        lines.append(f'            raise ValueError("{name}: {kind.class_name} was generated without it")')
    lines.append(kind.layer.text(returned_values(source)))
    return "\n".join(lines)


def _tuple(widths: tuple[int, ...]) -> str:
    inner = ", ".join("1" if width == 1 else "LANES" for width in widths)
    return f"({inner},)" if len(widths) == 1 else f"({inner})"


def _rewire(program: Program) -> str:
    source, ranks = program.source, program.mesh["tp"]
    drops = _drops_out(program)
    hook, refusal = ("\n    model.register_forward_pre_hook(refuse_dropout)", _REFUSAL) if drops else ("", "")
    return f'''
def rewire(model, layers):
    """Give every decoder layer of `model`, a {source.base_class}, the class that its config names for it."""
    if model.config.rewriter_ranks != LANES:
        raise ValueError(
            f"this checkpoint is bound to tp={ranks}: its layers compute {{LANES}} lanes, config.rewriter_ranks is "
            f"{{model.config.rewriter_ranks}}. Rewrite the original model for another number of ranks."
        )
    kinds = model.config.rewriter_layers
    if kinds is None or len(kinds) != len(layers):
        raise ValueError(f"config.rewriter_layers names {{len(kinds or ())}} layers, the model has {{len(layers)}}")
    widths = (1,)
    for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        if kind not in LAYER_CLASSES:
            raise ValueError(f"config.rewriter_layers[{{index}}] is {{kind!r}}; there are {{', '.join(LAYER_CLASSES)}}")
        layer_class = LAYER_CLASSES[kind]
        if getattr(layer_class, "takes", (1,)) != widths:
            raise ValueError(f"config.rewriter_layers[{{index}}]: {{kind!r}} cannot stand after {{kinds[:index][-1:]}}")
        if not issubclass(layer_class, type(layer)):
            raise ValueError(f"config.rewriter_layers[{{index}}]: {{kind!r}} is made for another layer than this one")
        widths = getattr(layer_class, "gives", (1,))
        # The layer stays the module that the source built: its children, parameter names, initialisation and the
        # order of random draws are the source's. Only its forward changes.
        layer.__class__ = layer_class
        use_lanes(layer)
    if widths != (1,):
        raise ValueError(f"config.rewriter_layers ends with {{kinds[-1]!r}}, but the final norm takes the stream alone")
    model.register_forward_hook(narrow_hidden_states){hook}


def narrow_hidden_states(model, args, output):
    """Cut recorded hidden states back to the residual stream, which stands first; of lanes, to their mean."""
    recorded = getattr(output, "hidden_states", None)
    if recorded is not None:
        size, kinds = output[0].shape[-1], model.config.rewriter_layers
        given = [getattr(LAYER_CLASSES[kind], "gives", (1,))[0] for kind in kinds]
        widths = [1, *given[: len(recorded) - 2], 1]  # the embedding, every layer, the final norm
        output.hidden_states = tuple(
            state if state is None else state[..., : width * size].unflatten(-1, (width, size)).mean(-2)
            for state, width in zip(recorded, widths, strict=True)
        )
    return output
{refusal}'''


_REFUSAL = """

def refuse_dropout(model, args):
    \"\"\"The layers leave out the source's dropout between its modules and the residual stream.\"\"\"
    if model.training:
        raise ValueError(
            "this model was rewritten with dropout between its modules, which its lanes do not compute: call eval(), "
            "or rewrite it from a config whose residual or hidden dropout is 0"
        )
"""


def _drops_out(program: Program) -> bool:
    """Whether the source's layers have dropout of their own, outside their modules: a sharded wiring has none."""
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
