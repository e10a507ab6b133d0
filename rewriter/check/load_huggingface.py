"""A script, not a module: `python -P load_huggingface.py REQUEST RESULT`, started by
`subprocess_logits.huggingface_logits`."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

# The generated file has to work where this package is not installed.
for name in ["rewriter", *(name for name in sys.modules if name.startswith("rewriter."))]:
    sys.modules[name] = None  # type: ignore[assignment]

import huggingface_hub  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import dynamic_module_utils  # noqa: E402

plain_model = runpy.run_path(str(Path(__file__).parents[1] / "weights" / "plain_model.py"))["plain_model"]

# A fork server imported these with other variables.
dynamic_module_utils.HF_MODULES_CACHE = os.environ["HF_MODULES_CACHE"]
huggingface_hub.constants.HF_HUB_OFFLINE = True


def main(request_path: str, result_path: str) -> None:
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    model, loaded = plain_model(request["directory"], True)
    manifest = Path(request["directory"], "rewrite.json")
    unused = manifest.exists() and json.loads(manifest.read_bytes()).get("unused")
    for what in ("missing_keys", "mismatched_keys", *([] if unused else ["unexpected_keys"])):
        names: list[Any] = sorted(map(str, loaded.get(what) or ()))
        if names:
            raise RuntimeError(f"{what.replace('_', ' ')}: {', '.join(names[:3])} ({len(names)} in all)")
    logits = {}
    with torch.no_grad():
        for index, batch in enumerate(request["batches"]):
            logits[str(index)] = model(input_ids=torch.tensor(batch), use_cache=False).logits.float().contiguous()
    save_file(logits, result_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
