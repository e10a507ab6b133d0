"""The end of generated files: the source's layers have to be those that the file was made for.

Another version of transformers than the file was made with is tried: its model is run, small and with random weights,
beside the same model with layers as they were read.
"""

import copy
import functools
import warnings

import torch
from transformers import LlamaConfig as SourceConfig
from transformers import LlamaForCausalLM as SourceModel
from transformers import __version__ as transformers_version

from rewriter.emit.huggingface.verbatim.model import name_caches
from rewriter.emit.huggingface.verbatim.per_rank import RANKS, output_rows, use_per_rank_modules

MADE_FOR = MADE_WITH = ""
SMALL = {}
TRACED = BOUND = ()


def check_source():
    """Try another version of transformers than MADE_WITH: warn if it computes the same, raise ImportError if not."""
    if transformers_version == MADE_WITH:
        return
    text = f"This file was generated for the {MADE_FOR} of transformers {MADE_WITH}, not of {transformers_version}. "
    changed = difference()
    if changed is None:
        text += "On random weights it computes the same. `rewrite refresh DIR` writes the file for it."
        warnings.warn(text, stacklevel=2)
        return
    raise ImportError(f"{text}{changed}Install {MADE_WITH}, or write the file for this one: `rewrite refresh DIR`.")


def check_untried():
    """Warn of another version of transformers than MADE_WITH, which cannot be tried."""
    if transformers_version != MADE_WITH:
        text = (
            f"This file was generated for the {MADE_FOR} of transformers {MADE_WITH}, not of {transformers_version}. "
        )
        warnings.warn(f"{text}Install {MADE_WITH}, or compare it: `rewrite verify DIR`.", stacklevel=2)


def difference():
    """A sentence on what the installed model computes otherwise than with the traced layers; None if nothing."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            torch.manual_seed(0)
            model = SourceModel(SourceConfig(**SMALL)).float().eval()
            for tensor in model.state_dict().values():
                if tensor.is_floating_point():
                    tensor.normal_(std=0.5)
            ids = torch.arange(3, 45).view(2, 21)
            if (child := ranks_differ(model, ids)) is not None:
                return child
            expected = logits_of(model, ids)
            for layer, layer_class in zip(model.layers, TRACED, strict=True):
                layer.__class__ = layer_class
                name_caches(layer)
            error = (logits_of(model, ids) - expected).abs().max() / expected.abs().max()
    except Exception as failure:
        return f"Whether it computes the same cannot be tried ({type(failure).__name__}: {failure}). "
    return None if error <= 1e-4 else f"On random weights it computes other logits, by {error:.1e} of the largest. "


def logits_of(model, ids):
    """Logits [tokens, vocabulary] of two rows, one padded at its left, then of three generated tokens, by cache."""
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    steps = model.generate(ids, attention_mask=mask, output_logits=True, **options).logits
    return torch.cat([model(ids, attention_mask=mask).logits[mask.bool()], *steps])


def ranks_differ(model, ids):
    """A sentence on the child of a layer whose output is not the sum of all ranks' parts; None where there is none.

    `BOUND` are layers of the model and classes of layers that compute per rank, whose children are tried in them.
    """
    calls = {}
    for index, kind in BOUND:
        source = model.layers[index]
        layer = copy.deepcopy(source)
        for name, child in source.named_children():
            note = functools.partial(note_call, calls, (index, name))
            child.register_forward_hook(note, with_kwargs=True)
        model(ids, use_cache=False)
        layer.__class__ = kind
        use_per_rank_modules(layer)
        for name, child in layer.named_children():
            try:
                same = ranks_add_up(child, calls.get((index, name)))
            except Exception as failure:
                text = f"{name} of {kind.__name__} cannot be tried rank by rank ({type(failure).__name__}: {failure})."
                warnings.warn(text, stacklevel=2)
                continue
            if not same:
                return f"Its {name} is not the sum of what {RANKS} ranks compute. "
    return None


def ranks_add_up(child, call):
    """True if the ranks' parts that a child computes are, in sum, the output of the source's call."""
    roles = {base.__name__ for module in child.modules() for base in type(module).__mro__}
    tokens = roles & {"PerRankTokenColumn", "PerRankTokenRow", "PerRankExperts"}
    if not (tokens or roles & {"PerRankColumn", "PerRankRow"}) or isinstance(child, torch.nn.Linear):
        return True  # nothing of it, or it is a projection itself, which is not transformers' code
    for module in child.modules():
        if getattr(module, "segments", None):  # of the real sizes
            part = len(output_rows(module)) / sum(module.segments)
            module.segments = [int(size * part) for size in module.segments]
    outputs = functools.partial(ranks_outputs, child, call, tokens, "PerRankColumn" in roles)
    expected, parts = call[2], outputs(torch.clone, torch.clone)
    if parts.shape[2] == RANKS:  # of its own input alone
        same = [(parts.sum(2), expected), (outputs(torch.clone, torch.neg)[:, :, 0], parts[:, :, 0])]
    else:
        swapped = outputs(torch.clone, torch.neg) + outputs(torch.neg, torch.clone)
        same = [(parts[:, :, 0], expected), (swapped, parts + outputs(torch.neg, torch.neg))]
    limit = 1e-4 * float(expected.abs().max())
    return all(torch.allclose(computed, wanted, 1e-4, limit) for computed, wanted in same)


def ranks_outputs(child, call, tokens, column, first, others):
    """[B, S, RANKS or 1, D] that a child returns for `first` of the source's input on rank 0 and `others` on others."""
    args, kwargs, expected = call

    def given(value):
        if not isinstance(value, torch.Tensor) or value.dim() != 3 or value.shape[-1] != expected.shape[-1]:
            return value
        own = [first(value), *[others(value)] * (RANKS - 1)]
        return torch.stack(own, 2).flatten(1, 2) if tokens else torch.cat(own, -1) if column else value

    output = child(*map(given, args), **{name: given(value) for name, value in kwargs.items()})
    output = output[0] if isinstance(output, tuple) else output
    if tokens:
        return output.unflatten(1, (-1, RANKS))
    return output if output.dim() > expected.dim() else output.unsqueeze(2)


def note_call(calls, place, child, args, kwargs, output):
    """Keep what a child was called with, and its output, to which its layer may add in place."""
    calls.setdefault(place, (args, kwargs, (output[0] if isinstance(output, tuple) else output).clone()))
