"""`transformers serve` for outputs with their own code: `python -m rewriter.runtime.serving.transformers_server DIR …`.

That server takes a model's class from the package `transformers` alone, so it finds none that a checkpoint defines
(`ModelManager` in transformers 5.17 to 5.23).
"""

from __future__ import annotations

import os
import sys

import transformers
from transformers.dynamic_module_utils import get_class_from_dynamic_module


def offer_class(directory: str | os.PathLike[str]) -> str:
    """Put the class that the code in `directory` defines where the server looks, for as long as this process lives.

    Runs that code. Returns the name of the class.
    """
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=True)
    own = get_class_from_dynamic_module(config.auto_map["AutoModelForCausalLM"], os.fspath(directory))
    setattr(transformers, own.__name__, own)
    return str(own.__name__)


if __name__ == "__main__":
    from transformers.cli.transformers import main

    offer_class(sys.argv[1])
    sys.argv[:1] = ["transformers", "serve"]
    main()
