"""Reading checkpoints: what an honest one gives, and that no dishonest one gets further than its header."""

from __future__ import annotations

import json
import re
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rewriter.common.errors import RewriterError
from rewriter.weights import Checkpoint
from rewriter.weights.expressions import Concat, Expression, Slice, Stack, Tensor, Transpose
from rewriter.weights.header import read_header

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
]
DTYPES += [torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64]


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """The bytes of a safetensors file with this header, well formed or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: list[Any], begin: int, end: int, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = raw({"a": entry([2], 0, 8)}, bytes(8))


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) if tensor.numel() else b""


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint in one file, as tensors; its directory is tmp_path."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "q": torch.randn(8, 6, generator=generator),
        "k": torch.randn(4, 6, generator=generator),
        "v": torch.randn(4, 6, generator=generator),
        "cube": torch.randn(3, 4, 5, generator=generator),
        "half": torch.randn(5, 3, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tensors


def test_reads_what_safetensors_wrote(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.tensors) == set(weights)
    assert checkpoint.files == (tmp_path / "model.safetensors",)
    assert checkpoint.metadata[checkpoint.files[0]] == {"format": "pt"}
    for name, tensor in weights.items():
        assert same(checkpoint.read(name), tensor)
        assert checkpoint.tensors[name].nbytes == tensor.nbytes
        assert checkpoint.shapes[name] == tuple(tensor.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reads_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(12).reshape(3, 4).remainder(2).to(dtype)
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    assert same(Checkpoint.open(tmp_path).read("x"), tensor)


def test_reading_copies_nothing_and_cannot_change_the_file(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    before = (tmp_path / "model.safetensors").read_bytes()
    checkpoint = Checkpoint.open(tmp_path)
    first, second = checkpoint.read("q"), checkpoint.read("q")
    assert first.data_ptr() == second.data_ptr()
    first.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_tensors_stay_readable_after_release(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    checkpoint = Checkpoint.open(tmp_path)
    tensor = checkpoint.read("q")
    checkpoint.release()
    assert same(tensor, weights["q"])


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (Slice(Tensor("q"), 0, ((2, 5),)), lambda t: t["q"][2:5]),
        (
            Slice(Tensor("q"), 1, ((4, 6), (0, 3), (0, 3))),
            lambda t: torch.cat([t["q"][:, 4:], *[t["q"][:, :3]] * 2], 1),
        ),
        (Concat((Tensor("q"), Tensor("k"), Tensor("v")), 0), lambda t: torch.cat([t["q"], t["k"], t["v"]])),
        (Stack((Tensor("k"), Tensor("v")), 1), lambda t: torch.stack([t["k"], t["v"]], 1)),
        (Transpose(Tensor("cube"), 0, 2), lambda t: t["cube"].transpose(0, 2)),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_evaluate(
    tmp_path: Path,
    weights: dict[str, torch.Tensor],
    expression: Expression,
    expected: Callable[[dict[str, torch.Tensor]], torch.Tensor],
) -> None:
    assert same(Checkpoint.open(tmp_path).evaluate(expression), expected(weights))


def test_evaluate_mixes_floating_point_dtypes_only(tmp_path: Path) -> None:
    stored = {"a": torch.zeros(2), "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.zeros(2, dtype=torch.int32)}
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert same(checkpoint.evaluate(Concat((Tensor("a"), Tensor("b")), 0)), torch.tensor([0.0, 0.0, 1.0, 1.0]))
    with pytest.raises(RewriterError, match=r"a is F32, c is I32"):
        checkpoint.evaluate(Concat((Tensor("a"), Tensor("c")), 0))


def test_packed_dtypes_can_be_listed_but_not_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw({"x": entry([4], 0, 2, "F4")}, bytes(2)))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.tensors["x"].nbytes == 2
    with pytest.raises(RewriterError, match=r"F4 .* cannot be read"):
        checkpoint.read("x")


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_link_to_nowhere_is_named(tmp_path: Path, name: str) -> None:
    """As in a copy of a folder of downloads, whose files are links to others."""
    (tmp_path / name).symlink_to("../../blobs/0123")
    with pytest.raises(
        RewriterError, match=rf"{name}: a link to \.\./\.\./blobs/0123, which does not exist\. Copy the"
    ):
        Checkpoint.open(tmp_path)


def test_an_index_is_read_where_the_single_file_is_a_link_to_nowhere(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    """As transformers does."""
    name = "model-00001-of-00001.safetensors"
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    index = {"weight_map": dict.fromkeys(weights, name)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model.safetensors").symlink_to("nowhere")
    assert set(Checkpoint.open(tmp_path).tensors) == set(weights)


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 269060552\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(RewriterError, match=r"model.safetensors: a Git LFS pointer, .* Run `git lfs pull` there"):
        Checkpoint.open(tmp_path)


def test_fingerprint_changes_with_the_file(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    first = Checkpoint.open(tmp_path).fingerprint()
    assert Checkpoint.open(tmp_path).fingerprint() == first
    save_file({**weights, "q": weights["q"].to(torch.float16)}, tmp_path / "model.safetensors")
    assert Checkpoint.open(tmp_path).fingerprint() != first


HOSTILE = {
    "empty file": (b"", "header too small"),
    "no header": (struct.pack("<Q", 0), "invalid JSON"),
    "truncated header": (GOOD[:20], "invalid header length"),
    "truncated data": (GOOD[:-1], "not fully covered"),
    "length is 2**64 - 1": (raw({}, length=(1 << 64) - 1), "header too large"),
    "no object": (raw(b"[1, 2]"), "invalid JSON"),
    "nested absurdly": (raw(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "recursion limit"),
    "a name that is no text": (
        raw(b'{"\\ud800": %b}' % json.dumps(entry([2], 0, 8)).encode(), bytes(8)),
        "invalid JSON",
    ),
    "entry is a number": (raw({"a": 5}), "invalid type: integer `5`"),
    "unknown dtype": (raw({"a": entry([2], 0, 8, "F31")}, bytes(8)), "unknown variant `F31`"),
    "negative size": (raw({"a": entry([-2, -1], 0, 8)}, bytes(8)), "integer `-2`"),
    "size is true": (raw({"a": entry([True, 2], 0, 8)}, bytes(8)), "boolean `true`"),
    "size overflows 64 bits": (raw({"a": entry([1 << 62, 1 << 62, 4], 0, 0)}), "overflow"),
    "sizes of nothing overflow 64 bits": (
        raw({"a": entry([1 << 62, 1 << 61, 0], 0, 0)}),
        "overflow|more than",
    ),
    "a million dimensions": (
        raw({"a": entry([1] * 100_000, 0, 4)}, bytes(4)),
        "'a' has the shape .* more than any",
    ),
    "offsets backwards": (raw({"a": entry([2], 8, 0)}, bytes(8)), "offset for tensor `a`"),
    "offsets out of bounds": (raw({"a": entry([4], 0, 16)}, bytes(8)), "not fully covered .it has"),
    "bytes disagree with shape": (raw({"a": entry([3], 0, 8)}, bytes(8)), "invalid shape, data type"),
    "overlap": (raw({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)), "offset for tensor `b`"),
    "a hole": (raw({"a": entry([2], 0, 8), "b": entry([1], 12, 16)}, bytes(16)), "offset for tensor `b`"),
    "data at the end": (raw({"a": entry([2], 0, 8)}, bytes(20)), "not fully covered"),
    "metadata holds objects": (raw({"__metadata__": {"a": {"b": 1}}}), "expected a string"),
    "a pickle under this name": (b"\x80\x02}q\x00." + bytes(40), "header too large"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_broken_headers_are_refused(tmp_path: Path, name: str) -> None:
    data, message = HOSTILE[name]
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(RewriterError, match=message) as caught:
        Checkpoint.open(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(caught.value)
    assert len(str(caught.value)) < 1000
    str(caught.value).encode()  # can be printed


def test_the_good_file_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(GOOD)
    assert Checkpoint.open(tmp_path).shapes == {"a": (2,)}


def test_a_device_or_pipe_is_not_opened(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "model.safetensors")
    failure: list[BaseException] = []

    def attempt() -> None:
        try:
            Checkpoint.open(tmp_path)
        except RewriterError as error:
            failure.append(error)

    thread = threading.Thread(target=attempt, daemon=True)  # opening a pipe would wait for ever
    thread.start()
    thread.join(120)
    assert "not a regular file" in str(failure[0])


def test_a_file_that_changed_is_not_mapped(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(GOOD)
    checkpoint = Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(GOOD[:-4])
    with pytest.raises(RewriterError, match="its size changed"):
        checkpoint.read("a")


def sharded(directory: Path, weight_map: Any, **files: dict[str, torch.Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, tensors in files.items():
        save_file(tensors, directory / f"{name}.safetensors")
    index = {"metadata": {"total_size": 8}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def test_reads_an_index(tmp_path: Path) -> None:
    one, two = {"a": torch.ones(2)}, {"b": torch.zeros(3, 3)}
    root = sharded(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, one=one, two=two)
    checkpoint = Checkpoint.open(root)
    assert [path.name for path in checkpoint.files] == ["one.safetensors", "two.safetensors"]
    assert same(checkpoint.read("a"), one["a"])
    assert same(checkpoint.read("b"), two["b"])


def test_symlinks_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    sharded(blobs, {"a": "one.safetensors"}, one={"a": torch.ones(2)})
    snapshot.mkdir(parents=True)
    for blob, name in (("one.safetensors", "one.safetensors"), ("model.safetensors.index.json",) * 2):
        (blobs / blob).rename(blobs / f"sha-{blob}")
        (snapshot / name).symlink_to(Path("../../blobs") / f"sha-{blob}")
    assert same(Checkpoint.open(snapshot).read("a"), torch.ones(2))


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "sub/../../secret.safetensors",
        "..\\secret.safetensors",
        *["one.bin", "/etc/passwd", "", "a\0b.safetensors", ".."],
    ],
)
def test_an_index_cannot_name_other_places(tmp_path: Path, name: str) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "secret.safetensors")
    root = sharded(tmp_path / "model", {"a": name})
    with pytest.raises(RewriterError, match=re.escape(repr(name))):
        Checkpoint.open(root)


@pytest.mark.parametrize("weight_map", [None, [], {}, "one.safetensors", {"a": 5}, {"a": None}])
def test_an_index_without_a_map_is_refused(tmp_path: Path, weight_map: Any) -> None:
    with pytest.raises(RewriterError, match="no weight_map"):
        Checkpoint.open(sharded(tmp_path, weight_map))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": {"a": "x", "a": "y"}}', "\0", "null"])
def test_an_index_that_is_no_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(RewriterError, match=re.escape(str(tmp_path / "model.safetensors.index.json"))):
        Checkpoint.open(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    root = sharded(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, one={"a": torch.ones(2)})
    with pytest.raises(RewriterError, match=r"two\.safetensors: missing, but .* places 'b' there"):
        Checkpoint.open(root)


def test_a_shard_whose_name_is_too_long_for_a_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RewriterError, match=r"missing, but .* places 'a' there"):
        Checkpoint.open(sharded(tmp_path, {"a": "x" * 300 + ".safetensors"}))


def test_files_say_which_tensors_they_hold_and_the_index_only_which_files(tmp_path: Path) -> None:
    index = {"a": "one.safetensors", "b": "two.safetensors", "gone": "one.safetensors", "c": "one.safetensors"}
    one, two = {"a": torch.ones(2), "unlisted": torch.ones(3)}, {"b": torch.ones(4), "c": torch.ones(5)}
    save_file({"d": torch.ones(6)}, tmp_path / "three.safetensors")
    shapes = Checkpoint.open(sharded(tmp_path, index, one=one, two=two)).shapes
    assert shapes == {"a": (2,), "unlisted": (3,), "b": (4,), "c": (5,)}


@pytest.mark.parametrize("other", [torch.zeros(2), torch.ones(3), torch.ones(2, dtype=torch.float16)])
def test_a_tensor_of_two_values_in_two_files_is_refused(tmp_path: Path, other: torch.Tensor) -> None:
    index = {"a": "one.safetensors", "b": "two.safetensors"}
    root = sharded(tmp_path / "same", index, one={"a": torch.ones(2)}, two={"a": torch.ones(2), "b": torch.ones(2)})
    assert same(Checkpoint.open(root).read("a"), torch.ones(2))
    root = sharded(tmp_path / "not", index, one={"a": torch.ones(2)}, two={"a": other, "b": torch.ones(2)})
    with pytest.raises(RewriterError, match=r"one\.safetensors and two\.safetensors hold 'a' with different values"):
        Checkpoint.open(root)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "consolidated.00.pth"]
)
def test_pickles_are_refused_by_name(tmp_path: Path, name: str) -> None:
    # A pickle that would leave a trace if anything loaded it.
    (tmp_path / name).write_bytes(b"cos\nmkdir\n(S'%b'\ntR." % str(tmp_path / "executed").encode())
    with pytest.raises(RewriterError, match=re.escape(name)) as caught:
        Checkpoint.open(tmp_path)
    assert "save_pretrained" in str(caught.value)
    assert not (tmp_path / "executed").exists()


def test_a_pickle_beside_safetensors_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    (tmp_path / "model.safetensors").write_bytes(GOOD)
    assert Checkpoint.open(tmp_path).shapes == {"a": (2,)}


def test_no_weights_no_directory_and_a_file(tmp_path: Path) -> None:
    with pytest.raises(RewriterError, match=r"no weights: neither model\.safetensors nor"):
        Checkpoint.open(tmp_path)
    with pytest.raises(RewriterError, match="no such directory"):
        Checkpoint.open(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(GOOD)
    with pytest.raises(RewriterError, match="is a file"):
        Checkpoint.open(tmp_path / "file")
    save_file({"a": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(RewriterError, match=r"adapter_model\.safetensors, which is not named"):
        Checkpoint.open(tmp_path)


def test_random_damage_never_gets_past_a_clear_error(tmp_path: Path) -> None:
    """Every single-byte change of a header either is refused by RewriterError or leaves a file that is still sound."""
    import random

    tensors = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(3, dtype=torch.float16)}
    save_file(tensors, tmp_path / "good.safetensors", metadata={"format": "pt"})
    good = (tmp_path / "good.safetensors").read_bytes()
    end = 8 + int.from_bytes(good[:8], "little")
    rng, refused = random.Random(0), 0
    for _ in range(600):
        damaged = bytearray(good)
        damaged[rng.randrange(end)] = rng.randrange(256)
        path = tmp_path / "model.safetensors"
        path.write_bytes(damaged)
        try:
            header = read_header(path)
        except RewriterError:
            refused += 1
            continue
        assert all(info.offsets[1] <= len(damaged) for info in header.tensors.values())
        Checkpoint.open(tmp_path).read(next(iter(header.tensors))).sum()
    assert refused > 300
