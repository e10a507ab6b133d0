"""Program → the Hugging Face side of an output directory: config.json and, where the wiring changed, a modeling file.

The generated file subclasses the source's decoder layer only: one class per kind of layer, whose `forward` is printed
from the wiring. What crosses between layers besides the residual stream is packed with it along the last dimension,
so that the source's own `Model.forward` (masks, caches, final norm, losses, generation) is used as it is.

Of a program that is bound to its ranks, all ranks are computed on one device. Parameters keep the source's names and
shapes, but for norms with weights per rank, which hold the weights of all ranks one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.common.model_class import takes_images
from rewriter.common.text_settings import ON_LOAD, with_text_settings
from rewriter.emit.huggingface.layers import PrintedLayer, print_layers
from rewriter.emit.huggingface.modeling_file import STANDARD, ModelNames, PrintedKind, modeling_file, standard_kinds
from rewriter.emit.huggingface.source_check import require_handed_on
from rewriter.emit.huggingface.source_classes import require_importable
from rewriter.emit.python_source import camel, free_name, identifier
from rewriter.emit.wiring_config import BlockMode, layer_modes, wiring_config
from rewriter.ir import Program, Source
from rewriter.ir.phases import prompt_phase
from rewriter.ir.residual import residual_blocks
from rewriter.passes.base import bound_ranks, scopes
from rewriter.passes.phases import both_wirings, rewired_wiring, single_device


@dataclass(frozen=True)
class HuggingFaceFiles:
    """The files that accompany the weights.

    `config` is for config.json. `modeling` is the text of the file `modeling_name`; both are None where the source's
    own code still computes the program.
    """

    config: dict[str, Any]
    modeling_name: str | None
    modeling: str | None
    model_type: str


def emit_huggingface(program: Program) -> HuggingFaceFiles:
    """The files that make `AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)` compute `program`.

    A sharded program is emitted as what one device computes: its model-level passes alone. When those leave every layer
    as the source wrote it, the source's config is returned unchanged and there is no modeling file. A program that is
    bound to its ranks is emitted as a model that computes every rank, with its reductions as they are (not scheduled).
    Then config.json names the ranks (`rewriter_ranks`) and what becomes of every reduction (`rewriter_pattern`).

    Where passes rewire the prompt alone, the generated model has both wirings and tells its layers which tokens are
    rewired; config.json describes the wiring of those, and says which they are (`rewriter_phase`).

    Raises RewriterError when the source's classes are not part of transformers, when the wiring cannot be written
    as layers, where a child of a layer cannot compute all ranks in the source's own code (the message names the
    node), and where the source's model does not hand on what tells its layers the rewired tokens.
    """
    if program.mesh or "runtime" in scopes(program):
        program = single_device(program).with_(recipe=program.recipe)
    return emit_as_wired(both_wirings(program).with_(recipe=program.recipe))


def emit_as_wired(program: Program) -> HuggingFaceFiles:
    """The files of a program that is already what one device computes: its wiring is emitted as it is."""
    source, bound = program.source, bound_ranks(program) is not None
    plain = HuggingFaceFiles(source_config(source), None, None, source.model_type)
    if program.origin is None:  # no pass changed what the model computes
        return plain
    require_importable(source)
    rewired = rewired_wiring(program)
    if prompt_phase(program) is not None:
        require_handed_on(source)
    kinds, assignment = _kinds(program, rewired, bound)
    if not kinds and not bound:
        return plain
    if source.base_class == source.architecture and (bound or prompt_phase(program) is not None):
        raise RewriterError(
            f"{source.architecture} has no base model that knows the whole config: its layers can be rewired, but "
            "neither bound to ranks nor for the prompt alone. Choose a recipe of the ladder's kind"
        )
    names = ModelNames(source)
    config = _own_config(source, names) | {"rewriter_layers": assignment} | wiring_config(rewired, bound)
    if bound:
        config["rewriter_ranks"] = program.mesh["tp"]
    modeling = modeling_file(program, kinds, names, bound)
    return HuggingFaceFiles(config, f"{names.module}.py", modeling, names.model_type)


def source_config(source: Source) -> dict[str, Any]:
    """config.json as it stands on disk; what the trace knows of it where there is none, or where it is another one.

    That is where the file configures several models, of which the causal LM is one.
    """
    file = Path(source.path) / "config.json" if source.path else None
    config: dict[str, Any] = json.loads(file.read_text()) if file and file.is_file() else dict(source.config)
    if config.get("model_type", source.model_type) != source.model_type:
        return dict(source.config)
    for part in (config, *config.values()):
        for key in ("_attn_implementation", "attn_implementation") if isinstance(part, dict) else ():
            part.pop(key, None)  # of the machine that it was trained on: here it may not be installed
    if not config.get("quantization_config", True):  # transformers would look for a method in it
        del config["quantization_config"]
    if not source.remote_code:  # what it names of the model's own code was not run, and is not copied
        kept = _code_of_tokenizer(config)
        config = {k: v for k, v in config.items() if k != "auto_map"} | ({"auto_map": kept} if kept else {})
    if source.config.get("tie_word_embeddings") is False and config.get("tie_word_embeddings"):
        config["tie_word_embeddings"] = False  # its weights are two: see `rewriter.tracing.parameters`
    config = with_text_settings(config, source.settings)
    return config | ({ON_LOAD: dict(source.on_load)} if source.on_load else {})


def _code_of_tokenizer(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of auto_map that is not the model's."""
    own = config.get("auto_map")
    return {name: own[name] for name in own if name == "AutoTokenizer"} if isinstance(own, dict) else {}


def _own_config(source: Source, names: ModelNames) -> dict[str, Any]:
    """The source's config.json with the generated classes instead of its own."""
    config = {k: v for k, v in source_config(source).items() if k not in ("_name_or_path", ON_LOAD)}
    config |= source.on_load  # which the generated config's class takes
    if "tie_word_embeddings" in source.config:  # said outright: its default is not the same for every class
        config.setdefault("tie_word_embeddings", source.config["tie_word_embeddings"])
    return config | {
        "architectures": [names.architecture],
        "auto_map": {
            **_code_of_tokenizer(config),
            "AutoConfig": f"{names.module}.{names.config}",
            "AutoModel": f"{names.module}.{names.base}",
            "AutoModelForCausalLM": f"{names.module}.{names.architecture}",
            **(
                {"AutoModelForImageTextToText": f"{names.module}.{names.architecture}"}
                if takes_images(source.architecture)
                else {}
            ),
        },
        "model_type": names.model_type,
    }


# --- kinds of layers


def _kinds(program: Program, rewired: Program, bound: bool) -> tuple[list[PrintedKind], list[str]]:
    """(the kinds of rewired layers in order of appearance, the kind's name of every layer).

    `rewired` is the wiring of rewired tokens alone, the program itself where all are.
    """
    source = program.source
    originals = print_layers(program.origin or program)
    modes: Sequence[Sequence[BlockMode] | None] = layer_modes(rewired) if bound else [None] * source.num_layers
    kinds: list[PrintedKind] = []
    assignment = []
    for index, (layer, original) in enumerate(zip(print_layers(program), originals, strict=True)):
        if index < source.joined and layer.packed[1]:
            raise _features_between(source)
        touched = not layer.same_computation(original)
        if not touched and not any(layer.packed):
            assignment.append(standard_kinds(source)[source.layer_kinds[index]])
            continue
        kind = next((k for k in kinds if k.layer == layer and source.alike(k.example, index)), None)
        if kind is None:
            wish = _kind_name(program, touched, layer, modes[index])
            name = free_name(wish, {*standard_kinds(source), *(k.name for k in kinds)}.__contains__)
            class_name = camel(name) + source.of_layer(index).layer_class
            what = _what(rewired, index, touched, layer, modes[index])
            kind = PrintedKind(name, class_name, layer, index, tuple(what))
            kinds.append(kind)
        assignment.append(kind.name)
    return kinds, assignment


def _features_between(source: Source) -> RewriterError:
    where = "layer 0" if source.joined == 1 else f"layers 0 to {source.joined - 1}"
    begin = source.joined + 1
    step = f"The recipe may rewire layers from {begin} on" if begin < source.num_layers else "Choose another model"
    return RewriterError(
        f"{source.architecture} adds features of images to the residual stream behind {where}, and the recipe hands on "
        f"more than the stream there, to which nothing would be added. {step}"
    )


def _kind_name(program: Program, touched: bool, layer: PrintedLayer, modes: Sequence[BlockMode] | None) -> str:
    """After its passes and what it takes and gives; with `modes`, after what became of its reductions."""
    rewriting = [identifier(entry.name) for entry in program.history if entry.kind != "exact"]
    rewrite = "packed" if modes is not None else "_".join(rewriting) or "rewired"
    if not touched:
        return "_to_".join(rewrite if end else STANDARD for end in layer.packed)
    if modes is None:
        place = {(False, False): "_alone", (False, True): "_first", (True, False): "_last", (True, True): ""}
        return rewrite + place[layer.packed]
    words = [block.mode.word or block.mode.label for block in modes]
    return words[0] if len(set(words)) == 1 else "_".join(words)


def _what(
    program: Program, index: int, touched: bool, layer: PrintedLayer, modes: Sequence[BlockMode] | None
) -> list[str]:
    """Description of a kind of layer, in a sentence or two; with `modes`, in one per block."""
    name = program.source.of_layer(index).layer_class
    exact = [f"So it does for rewired tokens; for exact ones it computes what {name} computes."] * layer.rewires
    if modes is not None:
        passing = [f"Computes what {name} computes, beside values that it passes on."]
        return [f"`{block.name}`: {block.mode.sentence}." for block in modes] + exact if touched else passing
    late: list[str] = []
    for block in residual_blocks(program) if touched else ():
        if block.layer == index and block.reads and block.reads[-1] < block.index:
            late.append(f"`{block.path.rpartition('.')[2]}`" if block.kind != "parallel" else "All of the layer")
    if late:
        verb = "reads" if len(late) == 1 else "read"
        sentences = [f"{' and '.join(late)} {verb} the residual stream as it was one block before."]
        if any(b.layer == index and b.mode.coefficients == "earlier" for b in residual_blocks(program)):
            sentences.append("What mixes the streams and scales what is added is computed from that value as well.")
    else:
        sentences = [f"Computes {name} with another wiring." if touched else f"Computes what {name} computes."]
    sentences += exact
    gives = len(layer.gives)
    if gives > 1:
        older = [f"what it was {_count(age)} before" for age in layer.ages[1:] if age]
        values = f"{gives - 1} value{'s' * (gives > 2)} that it computed before"
        carried = " and ".join(older) if len(older) == gives - 1 else values
        sentences.append(f"It hands on the residual stream, and {carried}.")
    elif len(layer.takes) > 1:
        sentences.append("It hands on the residual stream alone.")
    return sentences


def _count(blocks: int) -> str:
    return "one block" if blocks == 1 else f"{blocks} blocks"
