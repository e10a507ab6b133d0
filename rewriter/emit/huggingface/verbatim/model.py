"""Contents of every generated Hugging Face file: the model's classes, and how their layers are rewired."""

import inspect

import torch
from transformers import LlamaConfig as SourceConfig
from transformers import LlamaModel as SourceModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rewriter.emit.huggingface.verbatim.per_rank import RANKS, refuse_dropout, refuse_engines, use_per_rank_modules
from rewriter.emit.huggingface.verbatim.phases import CACHE_NAMES, tell_layers

LAYER_CLASSES = {"standard": LlamaDecoderLayer}
ALONE = 1  # what a layer takes or gives: the residual stream alone. (1,) where values have widths
vectors = int  # how many vectors of the hidden size that is. `sum` where values have widths


def rewire(model, layers, config=None):
    """Give every decoder layer of `model`, a SourceModel, the class that `config` (by default its own) names.

    `model` is the part of one that owns the layers where the source's causal LM calls that part.
    """
    config = model.config if config is None else config
    if config.rewriter_ranks != RANKS:
        raise ValueError(
            f"this checkpoint is bound to tp={RANKS}: its layers compute {RANKS} ranks, config.rewriter_ranks is "
            f"{config.rewriter_ranks}. Rewrite the original model for another number of ranks."
        )
    refuse_engines(config)
    kinds = config.rewriter_layers
    if kinds is None or len(kinds) != len(layers):
        raise ValueError(f"config.rewriter_layers names {len(kinds or ())} layers, the model has {len(layers)}")
    width = ALONE
    for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        if kind not in LAYER_CLASSES:
            raise ValueError(f"config.rewriter_layers[{index}] is {kind!r}; there are {', '.join(LAYER_CLASSES)}")
        layer_class = LAYER_CLASSES[kind]
        if getattr(layer_class, "takes", ALONE) != width:
            raise ValueError(f"config.rewriter_layers[{index}]: {kind!r} cannot stand after {kinds[:index][-1:]}")
        if width != ALONE and is_missing(layers[index - 1]) != is_missing(layer):
            places = [i for i, k in enumerate(kinds) if i and getattr(LAYER_CLASSES.get(k), "takes", ALONE) == ALONE]
            raise ValueError(
                f"the layers are cut before {index} ({kind!r}), which takes more than the residual stream from the "
                "layer before: pipeline parallelism passes on the stream alone. Use tensor parallelism, or cut "
                f"before one of the layers {', '.join(map(str, places)) or '(there is none)'}."
            )
        taken, width = width, getattr(layer_class, "gives", ALONE)
        if is_missing(layer):
            continue
        if not issubclass(layer_class, type(layer)):
            raise ValueError(f"config.rewriter_layers[{index}]: {kind!r} is made for another layer than this one")
        # The layer stays the module that the source built: its children, parameter names, initialisation and the
        # order of random draws are the source's. Only its forward changes.
        layer.__class__ = layer_class
        use_per_rank_modules(layer)
        if taken != ALONE:
            layer.packed_width = vectors(taken) * config.get_text_config().hidden_size
            layer.register_forward_pre_hook(require_packed_width, with_kwargs=True)
    if width != ALONE:
        raise ValueError(f"config.rewriter_layers ends with {kinds[-1]!r}, but the final norm takes the stream alone")
    model.register_forward_hook(narrow_hidden_states)
    model.register_forward_pre_hook(refuse_dropout)
    tell_layers(model, layers)


def is_missing(layer):
    """True for the Identity that an engine puts in the place of a layer of another pipeline stage."""
    return isinstance(layer, torch.nn.Identity)


def require_packed_width(layer, args, kwargs):
    """Refuse a hidden state without the values that the layer before hands on beside the residual stream."""
    width = [*args, *kwargs.values()][0].shape[-1]
    if width != layer.packed_width:
        raise ValueError(
            f"a {type(layer).__name__} takes {layer.packed_width} values per token from the layer before, and was "
            f"given {width}: the layers are cut before it. Pipeline parallelism passes on the residual stream alone. "
            "Use tensor parallelism, or cut before a layer that takes the stream alone."
        )


def narrow_hidden_states(model, args, output):
    """Cut recorded hidden states back to the residual stream, which stands first where values are packed."""
    recorded = getattr(output, "hidden_states", None)
    if recorded is not None:
        width = output[0].shape[-1]
        output.hidden_states = tuple(state if state is None else state[..., :width] for state in recorded)
    return output


class OwnConfig(SourceConfig):
    """SourceConfig that also names the kind of every decoder layer.

    The model type is not the source's: under that name, loading without trust_remote_code would silently build the
    original wiring.
    """

    model_type = "own_model_type"

    rewriter_layers: list[str] | None = None
    rewriter_delays: list[list[int]] | None = None  # by block: how many blocks late it reads the residual stream
    rewriter_norms: list[dict[str, str]] | None = None  # blocks that read it through another block's norm
    rewriter_pattern: list[dict[str, str]] | None = None  # the mode of each block, where the two above do not say all
    rewriter_modes: dict[str, dict] | None = None  # what each mode means


class OwnModel(SourceModel):
    """SourceModel whose decoder layers have the classes that its config names."""

    config_class = OwnConfig
    _no_split_modules = (*(SourceModel._no_split_modules or ()), *(c.__name__ for c in LAYER_CLASSES.values()))

    def __init__(self, config):
        super().__init__(config)
        rewire(self, self.layers)

    @classmethod
    def is_custom_code(cls):
        return False  # it is initialised as the source is, also the buffers that no checkpoint holds


def take_cache(kwargs):
    """The cache out of the arguments of a layer, whatever this version of transformers calls it."""
    return next((kwargs.pop(name) for name in CACHE_NAMES if name in kwargs), None)


def name_caches(layer):
    """Note on a layer, by path, what each of its modules calls the cache, or the first one inside it with a name."""
    layer.cache_names = {}
    for path, module in layer.named_modules():
        signatures = (inspect.signature(type(inside).forward).parameters for inside in module.modules())
        own = (name for names in signatures for name in CACHE_NAMES if name in names)
        layer.cache_names[path] = next(own, CACHE_NAMES[0])  # one that takes no cache may take any argument
