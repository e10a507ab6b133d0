"""Short runs of `adapt` on the small llama, which trace each config once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import adapted

from rewriter.adapt.adaptation import AdaptReport, adapt
from rewriter.adapt.options import AdaptOptions

SETTINGS = {
    "max_steps": 6, "learning_rate": 1e-2, "warmup_steps": 1, "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 4, "save_steps": 100, "use_cpu": True,
}  # fmt: skip
SAVED = {"save_steps": 2}


PLAIN = {"method": "sft", "too_long": "truncate"}


def run(out: Path, resume: bool = False, files: tuple[Path, Path, Path] | None = None, **options: Any) -> AdaptReport:
    """Six short steps on the small llama; `files` are the model and the data of another process."""
    settings = {**SETTINGS, **options.pop("settings", {})}
    directory, data, evaluation = files or own_files()
    return adapt(
        directory, data=data, evaluation=evaluation, out=out, verify="none", resume=resume,
        options=AdaptOptions(length=adapted.LENGTH, settings=settings, **(PLAIN | options)),
    )  # fmt: skip


def own_files() -> tuple[Path, Path, Path]:
    return adapted.directory("ladder"), adapted.text_file(), adapted.text_file(20, 1)
