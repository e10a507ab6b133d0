"""Program → the Hugging Face side of an output directory: config.json and, where the wiring changed, a modeling file.

The generated file subclasses the source's decoder layer only: one class per kind of layer, whose `forward` is printed
from the wiring. What crosses between layers besides the residual stream is packed beside it along the last dimension,
so that the source's own `Model.forward` (masks, caches, final norm, losses, generation) is used as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import transformers

from rewriter.analysis.residual import residual_blocks
from rewriter.common.version import VERSION
from rewriter.emit.layers import PrintedLayer, print_layers
from rewriter.emit.modeling_file import (
    ANNEALED,
    BLEND,
    STANDARD,
    HuggingFaceFiles,
    Names,
    annealing_attribute,
    anneals,
    conversions,
    docstring,
    imports,
    listed_kinds,
    model_classes,
    own_config,
    source_check,
    source_config,
    standard_kinds,
    table,
    untraced,
    wrapped,
)
from rewriter.emit.naming import camel, identifier
from rewriter.emit.per_rank_huggingface import emit_lanes
from rewriter.emit.python import bracketed
from rewriter.emit.source_classes import layer_arguments, require_importable, returned_values
from rewriter.ir import Program, Source
from rewriter.passes import annealing
from rewriter.passes.base import bound_ranks, scopes, single_device


@dataclass(frozen=True)
class _Kind:
    """A kind of decoder layer of the generated file: its name in the config, its class, and one layer that is of it."""

    name: str
    class_name: str
    layer: PrintedLayer
    example: int
    touched: bool


def emit_huggingface(program: Program, annealed: bool = False) -> HuggingFaceFiles:
    """The files that make `AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)` compute `program`.

    A sharded program is emitted as what one device computes: its model-level passes alone. When those leave every layer
    as the source wrote it, the source's config is returned unchanged and there is no modeling file. A program that is
    bound to its ranks is emitted as a model that computes every rank's lane.

    With `annealed`, the files are of a variant for training alone: each rewired layer blends what it reads or adds with
    what the original does, by its attribute `annealing` (a number or a 0-d tensor; 1.0, the rewritten layer, until it
    is set). Parameters are the same.

    Raises RewriterError when the source's classes are not part of transformers, or when the wiring cannot be written
    as layers (the message names the node). With `annealed`, also when no layer differs from the original.
    """
    if bound_ranks(program) is not None:
        single = single_device(program).with_(recipe=program.recipe)
        return emit_lanes(annealing.annealed(single) if annealed else single)
    single = _model_level(program)
    if annealed:
        single = annealing.annealed(single)
    config = source_config(single.source)
    plain = HuggingFaceFiles(config, None, None, single.source.model_type)
    if single.origin is None:  # no pass changed what the model computes
        return plain
    require_importable(single.source)
    kinds, assignment = _kinds(single)
    if not kinds:
        return plain
    names = Names(single.source)
    config = own_config(single.source, names) | {"rewriter_layers": assignment}
    modeling = _modeling(single, kinds, names)
    return HuggingFaceFiles(config, f"{names.module}.py", modeling, names.model_type)


def _model_level(program: Program) -> Program:
    """The program itself where no pass is about ranks, else what is left of it on one device."""
    if program.mesh or "runtime" in scopes(program):
        return single_device(program).with_(recipe=program.recipe)
    return program


def _kinds(program: Program) -> tuple[list[_Kind], list[str]]:
    """(the kinds of rewired layers in order of appearance, the kind's name of every layer)."""
    source = program.source
    standard = standard_kinds(source)
    originals = print_layers(program.origin or program)
    rewiring = [entry.name for entry in program.history if entry.kind != "exact"]
    rewrite = "_".join(map(identifier, rewiring)) or "rewired"
    kinds: list[_Kind] = []
    assignment = []
    for index, (layer, original) in enumerate(zip(print_layers(program), originals, strict=True)):
        touched = not layer.same_computation(original)
        if not touched and len(layer.takes) == len(layer.gives) == 1:
            assignment.append(standard[source.layer_kinds[index]])
            continue
        kind = next((k for k in kinds if _alike(program, k, layer, index)), None)
        if kind is None:
            wish = _kind_name(rewrite, touched, len(layer.takes), len(layer.gives))
            taken = [k.name for k in kinds]
            name = wish if wish not in taken else next(n for i in range(2, 10**6) if (n := f"{wish}_{i}") not in taken)
            kind = _Kind(name, camel(name) + source.of_layer(index).layer_class, layer, index, touched)
            kinds.append(kind)
        assignment.append(kind.name)
    return kinds, assignment


def _alike(program: Program, kind: _Kind, layer: PrintedLayer, index: int) -> bool:
    """Whether layer `index` is of this kind."""
    other = kind.layer
    printed_alike = (other.takes, other.gives, other.statements) == (layer.takes, layer.gives, layer.statements)
    return printed_alike and program.source.alike(kind.example, index)


def _kind_name(rewrite: str, touched: bool, takes: int, gives: int) -> str:
    if touched:
        place = {(False, False): "_alone", (False, True): "_first", (True, False): "_last", (True, True): ""}
        return rewrite + place[takes > 1, gives > 1]
    ends = (STANDARD if takes == 1 else rewrite, STANDARD if gives == 1 else rewrite)
    return f"{ends[0]}_to_{ends[1]}"


# --- the modeling file -----------------------------------------------------------------------------------------------


def _modeling(program: Program, kinds: list[_Kind], names: Names) -> str:
    source = program.source
    parts = [
        _header(program, kinds, names),
        f"{imports(source)}\n\n{source_check(source)}",
        *[BLEND] * anneals(program),
        *(_layer_class(program, kind) for kind in kinds),
        table(program.source, [(kind.name, kind.class_name) for kind in kinds]),
        _rewire(program.source),
        *model_classes(program.source, names, {"rewriter_layers": "list[str]"}),
        conversions(program.source, names),
    ]
    header, *code = (part.strip("\n") for part in parts)
    return header + "\n\n" + "\n\n\n".join(code) + "\n"


def _header(program: Program, kinds: list[_Kind], names: Names) -> str:
    source = program.source
    recipe = (program.recipe or {}).get("name")
    by = f"recipe {recipe}" if recipe else "passes " + (", ".join(r.name for r in program.history) or "by hand")
    lines = [
        f'"""{names.architecture}: {source.architecture} with some decoder layers rewired.',
        "",
        f"Generated by rewriter {VERSION} ({by}) from a {source.model_type} checkpoint, "
        f"with transformers {transformers.__version__}.",
    ]
    for entry in program.history:
        lines.append(wrapped(f"{entry.name}({entry.arguments()}): {entry.summary}", 4))
    if anneals(program):
        lines += ["", *wrapped(ANNEALED).splitlines()]
    about = (
        "Parameters, their names and everything around the decoder layers are the source's. `config.rewriter_layers` "
        "names the kind of every layer:"
    )
    lines += ["", *wrapped(about).splitlines(), ""]
    rewritten = [(kind.name, f"{kind.class_name}: {' '.join(_what(program, kind))}") for kind in kinds]
    lines += listed_kinds(source, rewritten)
    return "\n".join(lines).replace("\\", "\\\\") + '\n"""'


def _what(program: Program, kind: _Kind) -> list[str]:
    """What a kind of layer does, in a sentence or two."""
    source = program.source.of_layer(kind.example)
    sentences = []
    if not kind.touched:
        sentences.append(f"Computes what {source.layer_class} computes.")
    else:
        late = []
        for block in residual_blocks(program):
            if block.layer == kind.example and block.reads and block.reads[-1] < block.index:
                late.append(f"`{block.path.rpartition('.')[2]}`" if block.kind != "parallel" else "All of the layer")
        verb = "reads" if len(late) == 1 else "read"
        sentences.append(
            f"{' and '.join(late)} {verb} the residual stream as it was one block before."
            if late
            else f"Computes {source.layer_class} with another wiring."
        )
    takes, gives = len(kind.layer.takes), len(kind.layer.gives)
    older = [f"what it was {_count(age)} before" for age in kind.layer.stream_given[1:] if age]
    carried = " and ".join(older) if len(older) == gives - 1 and older else f"{gives - 1} earlier values"
    if gives > 1:
        sentences.append(f"It hands on the residual stream, and {carried}.")
    elif takes > 1:
        sentences.append("It hands on the residual stream alone.")
    return sentences


def _count(blocks: int) -> str:
    return "one block" if blocks == 1 else f"{blocks} blocks"


def _layer_class(program: Program, kind: _Kind) -> str:
    source = program.source.of_layer(kind.example)
    arguments = layer_arguments(source)
    parameters = [str(a) for a in arguments]
    if source.layer_var_kwargs:
        parameters.append("**kwargs")
    lines = [f"class {kind.class_name}({source.layer_class}):"]
    lines += docstring(_what(program, kind), 4)
    lines += ["", f"    takes = {len(kind.layer.takes)}", f"    gives = {len(kind.layer.gives)}"]
    lines += [*annealing_attribute(program, kind.example), ""]
    lines.append(bracketed("def forward(", ["self", *parameters], "):", 4))
    for name in untraced(program, arguments, kind.example):
        lines.append(f"        if {name} is not None:")
        lines.append(f'            raise ValueError("{name}: {kind.class_name} was generated without it")')
    lines.append(kind.layer.text(returned_values(source)))
    return "\n".join(lines)


def _rewire(source: Source) -> str:
    return f'''
def rewire(model, layers):
    """Give every decoder layer of `model`, a {source.base_class}, the class that its config names for it."""
    kinds = model.config.rewriter_layers
    if kinds is None or len(kinds) != len(layers):
        raise ValueError(f"config.rewriter_layers names {{len(kinds or ())}} layers, the model has {{len(layers)}}")
    width = 1
    for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        if kind not in LAYER_CLASSES:
            raise ValueError(f"config.rewriter_layers[{{index}}] is {{kind!r}}; there are {{', '.join(LAYER_CLASSES)}}")
        layer_class = LAYER_CLASSES[kind]
        if getattr(layer_class, "takes", 1) != width:
            raise ValueError(f"config.rewriter_layers[{{index}}]: {{kind!r}} cannot stand after {{kinds[:index][-1:]}}")
        if not issubclass(layer_class, type(layer)):
            raise ValueError(f"config.rewriter_layers[{{index}}]: {{kind!r}} is made for another layer than this one")
        width = getattr(layer_class, "gives", 1)
        # The layer stays the module that the source built: its children, parameter names, initialisation and the
        # order of random draws are the source's. Only its forward changes.
        layer.__class__ = layer_class
    if width != 1:
        raise ValueError(f"config.rewriter_layers ends with {{kinds[-1]!r}}, but the final norm takes the stream alone")
    model.register_forward_hook(narrow_hidden_states)


def narrow_hidden_states(model, args, output):
    """Cut recorded hidden states back to the residual stream, which stands first where values are packed."""
    recorded = getattr(output, "hidden_states", None)
    if recorded is not None:
        width = output[0].shape[-1]
        output.hidden_states = tuple(state if state is None else state[..., :width] for state in recorded)
    return output
'''
