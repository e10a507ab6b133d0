"""Writing weights: shards and copies, streamed, hashed, byte for byte what plain torch computes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rewriter.common.errors import RewriterError
from rewriter.weights import Checkpoint, ShardPlan, convert_files, plan_bytes
from rewriter.weights import shards as shards_module
from rewriter.weights.expressions import Concat, Expression, Slice, Stack, Tensor, Transpose
from rewriter.weights.finite import checked_pieces

Tensors = Mapping[str, torch.Tensor]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right.contiguous())


def copy_file(source: Path, target: Path, link: bool = False) -> str:
    """Copy one file that is no checkpoint's."""
    return convert_files(Checkpoint(source.parent, {}), [(source, target)], [], link=link)[target]


def write_shards(checkpoint: Checkpoint, plans: list[ShardPlan]) -> dict[Path, str]:
    return convert_files(checkpoint, [], plans)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """About 20 MB in two files: larger than a piece and a buffer, sizes that fit no block."""
    root = tmp_path_factory.mktemp("source")
    generator = torch.Generator().manual_seed(0)
    files = {
        "one.safetensors": {
            "wide": torch.randn(301, 4099, generator=generator),
            "tall": torch.randn(70_001, 13, generator=generator),
            "half": torch.randn(1031, 517, generator=generator).to(torch.bfloat16),
            "norm": torch.randn(4099, generator=generator),
            "scalar": torch.tensor(2.5),
            "flags": torch.arange(7) % 2 == 0,
            "empty": torch.empty(0, 5),
        },
        "two.safetensors": {
            "cube": torch.randn(6, 300, 401, generator=generator),
            "long": torch.randn(1_000_003, generator=generator),
            "tail": torch.randn(301, 7, generator=generator),
        },
    }
    for name, tensors in files.items():
        save_file(tensors, root / name, metadata={"format": "pt"})
    import json

    index = {"weight_map": {tensor: name for name, tensors in files.items() for tensor in tensors}}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return root, {**files["one.safetensors"], **files["two.safetensors"]}


CASES: dict[str, tuple[Expression, Callable[[Tensors], torch.Tensor]]] = {
    "whole": (Tensor("wide"), lambda t: t["wide"]),
    "one dimension": (Tensor("long"), lambda t: t["long"]),
    "scalar": (Tensor("scalar"), lambda t: t["scalar"]),
    "bool": (Tensor("flags"), lambda t: t["flags"]),
    "empty": (Tensor("empty"), lambda t: t["empty"]),
    "rows": (Slice(Tensor("tall"), 0, ((17, 69_000),)), lambda t: t["tall"][17:69_000]),
    "columns": (Slice(Tensor("wide"), 1, ((1000, 2111),)), lambda t: t["wide"][:, 1000:2111]),
    "one column": (Slice(Tensor("half"), 1, ((516, 517),)), lambda t: t["half"][:, 516:]),
    "depth": (Slice(Tensor("cube"), 2, ((3, 200),)), lambda t: t["cube"][:, :, 3:200]),
    "ranges that overlap": (
        Slice(Tensor("tall"), 0, ((60_000, 60_004), (0, 3), (1, 4), (0, 3))),
        lambda t: torch.cat([t["tall"][60_000:60_004], t["tall"][:3], t["tall"][1:4], t["tall"][:3]]),
    ),
    "columns that repeat": (
        Slice(Tensor("wide"), 1, ((5, 4000), (0, 9), (5, 4000))),
        lambda t: torch.cat([t["wide"][:, 5:4000], t["wide"][:, :9], t["wide"][:, 5:4000]], 1),
    ),
    "fused across files": (
        Concat((Tensor("tail"), Slice(Tensor("wide"), 1, ((0, 50),))), 1),
        lambda t: torch.cat([t["tail"], t["wide"][:, :50]], 1),
    ),
    "fused rows": (
        Concat((Slice(Tensor("tall"), 0, ((9, 19),)), Tensor("tall"), Slice(Tensor("tall"), 0, ((0, 1),))), 0),
        lambda t: torch.cat([t["tall"][9:19], t["tall"], t["tall"][:1]]),
    ),
    "slice of a fusion": (
        Slice(Concat((Tensor("tail"), Tensor("wide")), 1), 1, ((3, 12), (4000, 4010))),
        lambda t: torch.cat([t["tail"], t["wide"]], 1)[:, [*range(3, 12), *range(4000, 4010)]],
    ),
    "transpose": (Transpose(Tensor("wide"), 0, 1), lambda t: t["wide"].T),
    "slice of a transpose": (
        Slice(Transpose(Tensor("half"), 0, 1), 0, ((100, 400),)),
        lambda t: t["half"].T[100:400],
    ),
    "stack": (Stack((Tensor("norm"), Tensor("norm")), 0), lambda t: torch.stack([t["norm"]] * 2)),
    "stack of slices": (
        Stack((Slice(Tensor("cube"), 0, ((0, 3),)), Slice(Tensor("cube"), 0, ((3, 6),))), 1),
        lambda t: torch.stack([t["cube"][:3], t["cube"][3:]], 1),
    ),
    "stack at the end": (Stack((Tensor("tail"), Tensor("tail")), 2), lambda t: torch.stack([t["tail"]] * 2, 2)),
    "stack of scalars": (Stack((Tensor("scalar"), Tensor("scalar")), 0), lambda t: torch.stack([t["scalar"]] * 2)),
    "a row larger than a piece": (
        Transpose(Slice(Tensor("cube"), 0, ((1, 5),)), 0, 1),
        lambda t: t["cube"][1:5].transpose(0, 1),
    ),
}


def test_every_expression_is_written_as_torch_computes_it(
    source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    root, tensors = source
    plan = ShardPlan(tmp_path / "all.safetensors", {name: (case[0], None) for name, case in CASES.items()}, {"tp": "1"})
    hashes = write_shards(Checkpoint.open(root), [plan])
    written = load_file(plan.path)
    assert set(written) == set(CASES)
    for name, (_, expected) in CASES.items():
        assert same(written[name], expected(tensors)), name
    assert hashes == {plan.path: sha256(plan.path)}
    with safe_open(plan.path, "pt") as file:
        assert file.metadata() == {"tp": "1"}


@pytest.mark.parametrize("piece", [64, 4096, 100_000])
def test_the_bytes_do_not_depend_on_the_size_of_pieces(
    source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    root, tensors = source
    monkeypatch.setattr(shards_module, "MADE", piece)
    names = ["scalar", "bool", "empty", "slice of a fusion", "stack of scalars", "one column", "ranges that overlap"]
    plan = ShardPlan(tmp_path / "x.safetensors", {name: (CASES[name][0], None) for name in names})
    write_shards(Checkpoint.open(root), [plan])
    written = load_file(plan.path)
    for name in names:
        assert same(written[name], CASES[name][1](tensors)), name


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float64])
def test_conversion_rounds_as_torch_does(
    source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, target: torch.dtype
) -> None:
    root, tensors = source
    names = ["whole", "columns", "transpose", "scalar", "fused across files", "one column"]
    plan = ShardPlan(tmp_path / "x.safetensors", {name: (CASES[name][0], target) for name in names})
    write_shards(Checkpoint.open(root), [plan])
    written = load_file(plan.path)
    for name in names:
        assert same(written[name], CASES[name][1](tensors).to(target)), name


def test_parts_of_different_dtypes_become_one(source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    root, tensors = source
    both = Concat((Slice(Tensor("half"), 0, ((0, 301),)), Tensor("tail")), 1)
    checkpoint = Checkpoint.open(root)
    with pytest.raises(RewriterError, match=r"half is BF16, tail is F32.*--dtype"):
        write_shards(checkpoint, [ShardPlan(tmp_path / "x.safetensors", {"both": (both, None)})])
    plan = ShardPlan(tmp_path / "x.safetensors", {"both": (both, torch.bfloat16)})
    write_shards(checkpoint, [plan])
    expected = torch.cat([tensors["half"][:301], tensors["tail"].to(torch.bfloat16)], 1)
    assert same(load_file(plan.path)["both"], expected)


def test_eight_ranks_and_the_copy_in_one_pass(source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    root, tensors = source
    checkpoint = Checkpoint.open(root)
    before = {path: sha256(path) for path in checkpoint.files}
    plans = []
    for rank in range(8):
        rows = Slice(Tensor("tall"), 0, ((rank * 8750, rank * 8750 + 8750),))
        columns = Slice(Tensor("wide"), 1, ((rank * 512, rank * 512 + 512),))
        shard = {"tall": (rows, None), "wide": (columns, None), "norm": (Tensor("norm"), None)}
        plans.append(ShardPlan(tmp_path / f"rank-{rank}.safetensors", shard))
    done: list[tuple[Path, str]] = []
    copies = [(path, tmp_path / path.name) for path in checkpoint.files]
    hashes = convert_files(checkpoint, copies, plans, finished=lambda path, digest: done.append((path, digest)))
    assert len(hashes) == 10
    assert dict(done) == hashes == {path: sha256(path) for path in hashes}
    for path, target in copies:
        assert hashes[target] == before[path]
    ranks = [load_file(plan.path) for plan in plans]
    assert same(torch.cat([rank["tall"] for rank in ranks]), tensors["tall"][:70_000])
    assert same(torch.cat([rank["wide"] for rank in ranks], 1), tensors["wide"][:, :4096])
    assert plan_bytes(checkpoint, plans) == sum(t.nbytes for rank in ranks for t in rank.values())


def test_many_more_files_than_threads(source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    root, tensors = source
    plans = [ShardPlan(tmp_path / f"{i}.safetensors", {"norm": (Tensor("norm"), None)}) for i in range(100)]
    hashes = convert_files(Checkpoint.open(root), [], plans)
    assert len(set(hashes.values())) == 1
    assert same(load_file(plans[99].path)["norm"], tensors["norm"])


def test_copy_file(tmp_path: Path) -> None:
    for size in (0, 1, 4097, (16 << 20) + 1):
        (tmp_path / "a").write_bytes(os.urandom(size))
        (tmp_path / "b").unlink(missing_ok=True)
        assert copy_file(tmp_path / "a", tmp_path / "b") == sha256(tmp_path / "a") == sha256(tmp_path / "b")
        assert (tmp_path / "b").stat().st_nlink == 1


def test_saving_into_a_copy_leaves_the_source_and_a_link_does_not(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(os.urandom(10_000))
    before = sha256(tmp_path / "source")
    (tmp_path / "name").symlink_to("source")  # as in the hub's cache
    copy_file(tmp_path / "name", tmp_path / "copy")
    (tmp_path / "copy").write_bytes(b"fine-tuned")
    assert sha256(tmp_path / "source") == before
    assert copy_file(tmp_path / "name", tmp_path / "link", link=True) == before
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").samefile(tmp_path / "source")


def test_existing_files_are_not_overwritten(source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    root, _ = source
    checkpoint = Checkpoint.open(root)
    (tmp_path / "x").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        convert_files(checkpoint, [], [ShardPlan(tmp_path / "x", {"a": (Tensor("norm"), None)})])
    with pytest.raises(FileExistsError):
        copy_file(checkpoint.files[0], tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": (Tensor("nope"), None)}, "nope: the checkpoint has no tensor"),
        ({"a": (Slice(Tensor("wide"), 0, ((300, 302),)), None)}, r"\[300, 302\) does not lie"),
        ({"a": (Tensor("flags"), torch.bfloat16)}, "a: BOOL cannot become BF16"),
        ({"a": (Tensor("norm"), torch.int8)}, "a: F32 cannot become I8"),
    ],
)
def test_a_plan_that_does_not_fit_writes_nothing(
    source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, tensors: Any, message: str
) -> None:
    checkpoint = Checkpoint.open(source[0])
    good = ShardPlan(tmp_path / "good.safetensors", {"a": (Tensor("norm"), None)})
    with pytest.raises(RewriterError, match=message):
        convert_files(
            checkpoint,
            [(checkpoint.files[0], tmp_path / "copy")],
            [good, ShardPlan(tmp_path / "bad.safetensors", tensors)],
        )
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_shrinks_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(17 << 20))
    pieces = checked_pieces(tmp_path / "a", None, [])
    next(pieces)
    os.truncate(tmp_path / "a", 1000)
    with pytest.raises(RewriterError, match=r"a: it became shorter"):
        next(pieces)


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """1.6 GB of source, one tensor made of all of it: memory grows by pieces and what they read, not by the model."""
    code = """
import re, sys
from pathlib import Path
import torch
from rewriter.weights.expressions import Concat, Slice, Tensor
from rewriter.weights import Checkpoint, ShardPlan, convert_files
from rewriter.weights.header import encode_header
def peak():  # in KiB; ru_maxrss begins with what the process had that started this one
    return int(re.search("VmHWM:[^0-9]*([0-9]+)", Path("/proc/self/status").read_text())[1])
root = Path(sys.argv[1])
names = [f"w{i}" for i in range(6)]
with open(root / "model.safetensors", "wb") as file:
    file.write(encode_header({n: ("BF16", (16384, 8192), 2 << 27) for n in names}, {}))
    file.truncate(file.tell() + 6 * (2 << 27))  # a sparse file: pages of zeros cost memory like others, and no disk
checkpoint = Checkpoint.open(root)
before = peak()
columns = [Slice(Tensor(n), 1, ((0, 64),)) for n in names]
convert_files(checkpoint, [], [ShardPlan(root / "x", {"fused": (Concat(tuple(columns), 0), None)})])
print((peak() - before) // 1024)
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, cwd=Path.cwd()
    )
    assert int(result.stdout) < 200  # 64 MiB that are read for a piece of at most 16 MiB
