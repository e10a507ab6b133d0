"""An output directory of the hand-written sharded model of runtime_qwen.py."""

from __future__ import annotations

import json
import shutil

import runtime_qwen
import runtime_reference as reference
from safetensors.torch import save_file


def write(root, ranks, class_name="Model", source=None):
    """An output directory as the emitter lays it out, for tests/support/runtime_qwen.py."""
    part = root / "runtime" / f"tp{ranks}"
    part.mkdir(parents=True)
    if source is None:
        shutil.copy(runtime_qwen.__file__, part / "module.py")
    else:
        (part / "module.py").write_text(source)
    files = [f"runtime/tp{ranks}/rank-{rank}.safetensors" for rank in range(ranks)]
    for rank, name in enumerate(files):
        own = {key: reference.shard(key, value, rank, ranks).contiguous() for key, value in reference.weights().items()}
        save_file(own, root / name)
    entry = {"module": f"runtime/tp{ranks}/module.py", "class": class_name, "ranks": files}
    manifest = {"mesh": {"tp": ranks}, "runtime": {f"tp{ranks}": entry}}
    (root / "rewrite.json").write_text(json.dumps(manifest))
    return root


def manifest(root, change):
    content = json.loads((root / "rewrite.json").read_text())
    change(content)
    (root / "rewrite.json").write_text(json.dumps(content))
