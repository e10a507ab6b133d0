"""What generated files hold whose layers give children the cache under another name than they get it."""

import inspect

CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "cache_params", "layer_past")


def take_cache(kwargs):
    """The cache out of the arguments of a layer, whatever this version of transformers calls it."""
    return next((kwargs.pop(name) for name in CACHE_NAMES if name in kwargs), None)


def name_caches(layer):
    """Note on a layer, by path, what each of its modules calls the cache, or the first one inside it with a name."""
    layer.cache_names = {}
    for path, module in layer.named_modules():
        signatures = (inspect.signature(type(inside).forward).parameters for inside in module.modules())
        found = (name for names in signatures for name in CACHE_NAMES if name in names)
        layer.cache_names[path] = next(found, CACHE_NAMES[0])  # one that takes no cache may take any argument
