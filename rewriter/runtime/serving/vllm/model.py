"""A rewritten model in vLLM: vLLM's own class of the source's architecture, its layers rewired as config.json says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from torch import Tensor, nn
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.distributed.utils import get_pp_indices
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.runner.moe_runner_interface import MoERunnerInterface
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.models.utils import PPMissingLayer

from rewriter.output.sum_schedule import Sum, SumSchedule, Unsupported, schedule_of
from rewriter.runtime.serving.vllm.layer_form import form_of
from rewriter.runtime.serving.vllm.phased_layer import PhasedLayer
from rewriter.runtime.serving.vllm.phases import phase_of, tell_rows
from rewriter.runtime.serving.vllm.rewired_layer import RewiredLayer
from rewriter.runtime.serving.vllm.sums import overlaps

logger = init_logger(f"vllm.{__name__}")  # vLLM shows the messages of its own loggers


class RewrittenModel:
    """Mixed into a class of vLLM's models. Layers are rewired once they are made, before weights are loaded."""

    rewriter_ranks: int | None = None

    def __new__(cls, *, vllm_config: VllmConfig, prefix: str = "", **other: Any) -> Any:
        """A model of this class, or of vLLM's Transformers backend where the layers cannot be rewired. Raises
        ValueError for a model that is bound to its ranks and cannot be served."""
        model: Any = object.__new__(cls)
        check_engine(vllm_config)
        try:
            native_init: Any = super(RewrittenModel, model).__init__
            native_init(vllm_config=vllm_config, prefix=prefix, **other)
            model.rewriter_ranks = rewire(model, vllm_config).ranks
        except Unsupported as reason:
            if not is_generated(vllm_config):
                return as_it_is(model, vllm_config, prefix, str(reason))
            return on_backend(vllm_config, prefix, str(reason))
        return model

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **other: Any) -> None:
        """Done by __new__."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        if self.rewriter_ranks is not None:
            parameters = dict(self.named_parameters())  # type: ignore[attr-defined]
            weights = own_norms(weights, parameters, self.rewriter_ranks)
        return super().load_weights(weights)  # type: ignore[misc]

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Raises ValueError: drafts that read hidden states would read some whose sums are under way."""
        raise ValueError(
            "rewriter: a draft model that reads the target's hidden states (EAGLE 3) was trained on the original's, "
            "and some of a rewritten model's are not there between its layers. Use ngram or draft-model speculation."
        )


@cache
def rewritten_class(native: Any) -> type[nn.Module]:
    """`native`, a class of vLLM's models, for rewritten checkpoints of it."""
    return type(f"Rewriter{native.__name__}", (RewrittenModel, native), {"__module__": __name__})


def check_engine(vllm_config: VllmConfig) -> None:
    """Raises ValueError for how the engine runs a model, where that would give wrong tokens."""
    config, parallel = vllm_config.model_config.hf_config, vllm_config.parallel_config
    ranks = getattr(config, "rewriter_ranks", None)
    if ranks is not None and parallel.tensor_parallel_size != ranks:
        raise ValueError(
            f"rewriter: this checkpoint is bound to {ranks} ranks, and --tensor-parallel-size is "
            f"{parallel.tensor_parallel_size}: serve it with --tensor-parallel-size {ranks}, or rewrite the original "
            f"model with --tp {parallel.tensor_parallel_size}"
        )
    if getattr(parallel, "enable_dbo", False):
        raise ValueError("rewriter: --enable-dbo runs two batches at once, whose sums would mix: leave it out")


def is_generated(vllm_config: VllmConfig) -> bool:
    """False for a checkpoint that keeps the source's own code: only its sums are quantized."""
    return getattr(vllm_config.model_config.hf_config, "rewriter_layers", None) is not None


def as_it_is(model: Any, vllm_config: VllmConfig, prefix: str, reason: str) -> nn.Module:
    """vLLM's own model, whose sums are exact."""
    logger.warning("rewriter: sums are not quantized, because %s", reason)
    forget_layers(vllm_config)
    own: Any = type(model).__bases__[1]
    made: nn.Module = own(vllm_config=vllm_config, prefix=prefix)
    return made


def forget_layers(vllm_config: VllmConfig) -> None:
    """Let vLLM forget the layers of the model that was begun."""
    vllm_config.compilation_config.static_forward_context.clear()
    vllm_config.compilation_config.static_all_moe_layers.clear()


def on_backend(vllm_config: VllmConfig, prefix: str, reason: str) -> nn.Module:
    """The model on vLLM's Transformers backend, with the generated modeling file: right, without overlap."""
    from vllm.model_executor.models import transformers

    name = type(vllm_config.model_config.hf_config).__name__
    if getattr(vllm_config.model_config.hf_config, "rewriter_ranks", None) is not None:
        raise ValueError(
            f"rewriter: vLLM cannot serve this checkpoint ({name}), which is bound to its ranks, because {reason}. "
            "`rewrite generate` runs it"
        )
    if phase_of(vllm_config.model_config.hf_config) is not None:
        raise ValueError(
            f"rewriter: vLLM cannot serve this checkpoint ({name}), which rewires tokens of the prompt alone, because "
            f"{reason}. `rewrite generate` runs it"
        )
    if vllm_config.model_config.is_hybrid or vllm_config.model_config.is_attention_free:
        raise ValueError(
            f"rewriter: vLLM cannot serve this checkpoint ({name}), whose mixers keep a state that the Transformers "
            f"backend has no cache for, because {reason}. `rewrite generate` runs it"
        )
    logger.warning("rewriter: nothing of %s overlaps: it runs on the Transformers backend, because %s", name, reason)
    with_generated_config(vllm_config)
    forget_layers(vllm_config)
    images = "MultiModal" if vllm_config.model_config.is_multimodal_model else ""
    experts = "MoE" if vllm_config.model_config.get_num_experts() > 0 else ""
    backend = getattr(transformers, f"Transformers{images}{experts}ForCausalLM")
    model: nn.Module = backend(vllm_config=vllm_config, prefix=prefix)
    return model


def with_generated_config(vllm_config: VllmConfig) -> None:
    """Give the engine the config class of the generated modeling file, which transformers' code asks for."""
    model = vllm_config.model_config
    if not model.trust_remote_code:
        raise ValueError("rewriter: the Transformers backend runs the checkpoint's own code: give --trust-remote-code")
    name = model.hf_config.auto_map["AutoConfig"]
    generated = get_class_from_dynamic_module(name, model.model, revision=model.revision)
    given = {key: value for key, value in model.hf_config.to_dict().items() if key != "model_type"}
    model.hf_config = generated.from_dict(given)
    model.hf_text_config = model.hf_config.get_text_config()


def rewire(model: nn.Module, vllm_config: VllmConfig) -> SumSchedule:
    """Give the decoder layers of `model` the wiring that config.json describes. Raises Unsupported."""
    config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
    depth = vllm_config.model_config.hf_text_config.num_hidden_layers
    layers = decoder_layers(language_model(model), depth)
    blocks = {index: blocks_of(layer) for index, layer in layers.items()}
    forms = {index: form_of(layer, blocks[index], dtype) for index, layer in layers.items()}
    mergeable = all(form.mergeable for form in forms.values())
    if len({(form.paired, form.spare) for form in forms.values()}) > 1:
        raise Unsupported("its layers hand on the residual stream in different ways")
    stages = vllm_config.parallel_config.pipeline_parallel_size
    cuts = [get_pp_indices(depth, stage, stages)[1] - 1 for stage in range(stages - 1)]  # last layers of stages
    schedule = schedule_of(config, cuts, mergeable)
    if cuts and any(form.spare for form in forms.values()):
        raise Unsupported("its layers return more than their stream, which pipeline stages would hand on")
    refuse_cuts(schedule, cuts, all(form.paired for form in forms.values()))
    phased = phase_of(config) is not None
    if phased:
        tell_rows()
    previous: Any = None
    for index, layer in layers.items():
        form, steps = forms[index], schedule.layers[index]
        if len(steps) != len(form.branches):
            raise Unsupported(f"layer {index} has {len(form.branches)} blocks in vLLM and {len(steps)} in config.json")
        if not any(step.unreduced or step.late or step.factor != 1.0 for step in steps):
            previous = None
            continue
        desynced = any(step.sum in (Sum.DROP, Sum.RESYNC_SUM, Sum.RESYNC_MEAN) for step in steps)
        if desynced and not all(isinstance(a, float) for b in form.branches for a in b.after):
            raise Unsupported("a norm follows its sums, some of which are dropped")
        if not form.paired and steps[0].late and previous is None and index == min(layers) > 0:
            raise Unsupported(
                "a pipeline stage begins where the stream is read late, and its layers hand on one tensor"
            )
        bound = schedule.ranks is not None
        exits = tuple(
            tuple(only_exit(blocks[index][path], f"layer {index}'s {path}", bound) for path in branch.paths)
            if step.unreduced
            else ()
            for branch, step in zip(form.branches, steps, strict=True)
        )
        rewired: Any = layer
        layer_class: Any = type(layer)
        rewired.__class__ = rewired_class(layer_class, PhasedLayer if phased else RewiredLayer)
        if phased:
            rewired.own_form, rewired.exits = form, exits
        else:
            for leaving in chain.from_iterable(exits):
                leaving.reduce(False)
        rewired.form = form.with_norms(schedule.norms[index]).with_factors([step.factor for step in steps])
        rewired.steps = steps
        rewired.previous = () if previous is None else (previous,)
        previous = rewired
    logger.info(
        "rewriter: %d of %d all-reduces of %s overlap with the next block%s",
        schedule.overlapped, schedule.summed, type(model).__name__,
        "" if overlaps() else ", but REWRITER_OVERLAP=0 waits for each",
    )  # fmt: skip
    for wire, count in schedule.quantized.items():
        logger.info(
            "rewriter: %d of %d all-reduces travel as %s where they have %d bytes or more%s",
            count, schedule.summed, wire.format, wire.min_bytes, ", of rewired tokens" if phased else "",
        )  # fmt: skip
    return schedule


@cache
def rewired_class(layer_class: Any, mixed_in: Any) -> type[nn.Module]:
    return type(f"Rewired{layer_class.__name__}", (mixed_in, layer_class), {"__module__": layer_class.__module__})


def language_model(model: Any) -> nn.Module:
    """The part of `model` that has the text's layers: a model that takes images may have as many in its towers."""
    found: nn.Module = model.get_language_model() if hasattr(model, "get_language_model") else model
    return found


def decoder_layers(model: nn.Module, count: int) -> dict[int, nn.Module]:
    """The decoder layers that this pipeline stage holds, by number. Raises Unsupported."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    held = [{i: m for i, m in enumerate(of) if not isinstance(m, PPMissingLayer)} for of in lists]
    held = [layers for layers in held if layers and all(map(blocks_of, layers.values()))]
    if len(held) != 1:
        raise Unsupported(f"{type(model).__name__} has {len(held)} lists of {count} decoder layers")
    return held[0]


def refuse_cuts(schedule: SumSchedule, cuts: Sequence[int], paired: bool) -> None:
    """Raises ValueError on every stage where one of them could not be told what it reads late, or has added alone."""
    drifting = False
    for index, steps in enumerate(schedule.layers):
        if index - 1 in cuts and (drifting or (steps[0].late and (steps[0].own or not paired))):
            free = [i for i in range(1, len(schedule.layers)) if not schedule.layers[i][0].late]
            raise ValueError(
                f"rewriter: a pipeline stage would begin at layer {index}, which reads more than the residual stream. "
                f"Use tensor parallelism, or stages that begin at one of the layers {free} (VLLM_PP_LAYER_PARTITION)"
            )
        for step in steps:
            drifting = step.sum is Sum.DROP or (drifting and step.sum not in (Sum.RESYNC_SUM, Sum.RESYNC_MEAN))


def own_norms(
    weights: Iterable[tuple[str, Tensor]], parameters: Mapping[str, Tensor], ranks: int
) -> Iterator[tuple[str, Tensor]]:
    """`weights`, where norms that have weights per rank ([P · D]) have this rank's."""
    rank = get_tensor_model_parallel_rank()
    for name, weight in weights:
        wanted = parameters.get(name)
        if wanted is not None and weight.dim() == 1 and weight.numel() == ranks * wanted.numel():
            weight = weight.view(ranks, -1)[rank]
        yield name, weight


# --- where blocks sum over ranks


def blocks_of(layer: nn.Module) -> Mapping[str, list[nn.Module]]:
    """The children of `layer` that sum over ranks, each with the modules inside it that do."""
    return {name: exits for name, child in layer.named_children() if (exits := _exits(child))}


@dataclass(frozen=True)
class Exit:
    """The module in a block that sums over ranks."""

    module: Any

    def reduce(self, yes: bool) -> None:
        """Let the block sum, or return a rank's part of its sum."""
        if isinstance(self.module, RowParallelLinear):
            self.module.reduce_results = yes
        else:
            self.module.moe_config.skip_final_all_reduce = not yes


def only_exit(exits: list[nn.Module], where: str, bound: bool) -> Exit:
    """The exit of a block. Raises Unsupported where it sums in more than one place, and where a `bound` model would
    need a bias on every rank."""
    if len(exits) != 1:
        raise Unsupported(f"{where} sums over ranks in {len(exits)} places")
    (one,) = exits
    if isinstance(one, RowParallelLinear):
        if bound and one.bias is not None:
            raise Unsupported(f"{where} has a bias, and the model's ranks go on with their own parts of the sum")
        return Exit(one)
    config: Any = one.moe_config
    if config.is_sequence_parallel or config.moe_parallel_config.use_all2all_kernels:
        raise Unsupported(f"the experts of {where} are not tensor-parallel: give no expert parallelism")
    return Exit(one)


def _exits(block: nn.Module) -> list[nn.Module]:
    rows = [m for m in block.modules() if isinstance(m, RowParallelLinear) and m.reduce_results]
    experts = [m for m in block.modules() if isinstance(m, MoERunnerInterface)]
    return [*rows, *experts]
