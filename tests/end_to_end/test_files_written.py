"""Files that `--out` and `--html` name: whole or not at all, and what stands there keeps its kind."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rewriter.cli import main
from rewriter.common.errors import RewriterError
from rewriter.common.files import require_place, write_text


def made(path: Path, kind: int, device: int) -> Path:
    try:
        os.mknod(path, kind | 0o600, device)
    except PermissionError:
        pytest.skip("only root makes devices")
    return path


def test_a_file_is_replaced_in_one_step_and_a_link_leads_to_it(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/page").write_text("old")
    (tmp_path / "link").symlink_to("real/page")
    write_text(tmp_path / "link", "new", "--html")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real/page").read_text() == "new"
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["page"]


def test_a_device_stays_one(tmp_path: Path) -> None:
    null = made(tmp_path / "null", stat.S_IFCHR, os.makedev(1, 3))
    write_text(null, "text", "--html")
    assert null.is_char_device()
    assert [path.name for path in tmp_path.iterdir()] == ["null"]
    with pytest.raises(RewriterError, match=r"--out .*null: it is not a file, and stays as it is"):
        require_place(null, "--out", more_beside=True)


def test_a_disk_is_not_written(tmp_path: Path) -> None:
    disk = made(tmp_path / "disk", stat.S_IFBLK, os.makedev(7, 250))
    with pytest.raises(RewriterError, match=r"--html .*disk: it is not a file, and stays as it is"):
        write_text(disk, "text", "--html")


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_text(tmp_path / "pipe", "text", "--html")
    reader.join(120)
    assert read == ["text"]


@pytest.mark.parametrize("to", ["a pipe", "a file"])
def test_standard_output_is_what_it_was(tmp_path: Path, to: str) -> None:
    code = "from pathlib import Path; from rewriter.common.files import write_text; import sys; "
    code += "write_text(Path('/dev/stdout'), 'page', '--html'); print(' and more')"
    with (tmp_path / "file").open("w") as file:
        stdout = subprocess.PIPE if to == "a pipe" else file
        ran = subprocess.run([sys.executable, "-c", code], stdout=stdout, text=True, check=True)
    assert (ran.stdout or (tmp_path / "file").read_text()) == "page and more\n"


def test_a_search_refuses_a_device_before_it_begins(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "m", "--fabric", "pcie-gen4", "--tp", "2", "--loss", "1%", "--out", os.devnull]) == 2
    assert f"--out {os.devnull}: it is not a file" in capsys.readouterr().err
    assert Path(os.devnull).is_char_device()
