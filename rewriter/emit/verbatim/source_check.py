"""What generated files end with: the source's layers have to be those that the file was made for.

A newer transformers may have written them in another way. Then its model is run, small and with random weights, beside
the same model with layers as they were read.
"""

import inspect
import sys
import warnings

import torch
from packaging.version import Version
from transformers import LlamaConfig as SourceConfig
from transformers import LlamaForCausalLM as SourceModel
from transformers import __version__ as transformers_version

from rewriter.emit.verbatim.cache_names import name_caches
from rewriter.emit.verbatim.fingerprint import fingerprint

FINGERPRINTS = {}
FORWARD_ONLY = True
MADE_WITH = VERSIONS = NEWEST = ""
SMALL = {}
READ = ()


def check_source():
    """Raise ImportError unless the source's layers are known, or those of a newer transformers compute the same."""
    for source_class, known in FINGERPRINTS.items():
        module = inspect.getsource(sys.modules[source_class.__module__])
        if fingerprint(module, source_class.__name__, FORWARD_ONLY) == known:
            continue
        text = (
            f"{source_class.__name__} of transformers {transformers_version} is not the one that this file was "
            f"generated for (transformers {MADE_WITH}). Versions known to have that one: {VERSIONS}. "
        )
        if Version(transformers_version) > Version(NEWEST):
            found = difference()
            if found is None:
                text += "On random weights this one computes the same. `rewrite refresh DIR` writes the file for it."
                warnings.warn(text, stacklevel=2)
                return
            text += found
        text += "Install one of them, or convert the model again with this version, as `rewrite refresh DIR` does."
        raise ImportError(text)


def difference():
    """What the source's model computes otherwise with its layers as they were read, in words; None for nothing."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            torch.manual_seed(0)
            model = SourceModel(SourceConfig(**SMALL)).float().eval()
            for parameter in model.parameters():
                parameter.normal_(std=0.5)
            ids = torch.arange(3, 24)[None]
            expected = logits_of(model, ids)
            for layer, layer_class in zip(model.layers, READ, strict=True):
                layer.__class__ = layer_class
                name_caches(layer)
            error = (logits_of(model, ids) - expected).abs().max() / expected.abs().max()
    except Exception as failure:
        return f"Whether it computes the same cannot be tried ({type(failure).__name__}: {failure}). "
    return None if error <= 1e-4 else f"On random weights it computes other logits, by {error:.1e} of the largest. "


def logits_of(model, ids):
    """Logits of all tokens at once, and of three that follow, which read the cache."""
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    return torch.cat([model(ids).logits[0], *model.generate(ids, output_logits=True, **options).logits])
