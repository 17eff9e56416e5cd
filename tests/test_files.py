"""Files are whole or not there: a failure leaves what was there before and nothing half-written."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from safetensors import SafetensorError

from attnres.errors import UserError
from attnres.files import (
    Taken,
    copy_files,
    lock,
    locked,
    recover_folder,
    replaced_folder,
    write_bytes,
    write_json,
    write_text,
)
from attnres.reading import read_json


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "a.json", {"é": [1, 2.5, None]})
    write_text(tmp_path / "a.txt", "ü")
    write_bytes(tmp_path / "a.bin", b"\x00\xff")
    assert read_json(tmp_path / "new" / "a.json") == {"é": [1, 2.5, None]}
    assert (tmp_path / "a.txt").read_bytes() == "ü".encode() and (tmp_path / "a.bin").read_bytes() == b"\x00\xff"
    assert names(tmp_path) == ["a.bin", "a.txt", "new"]


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a", "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*a: No space left on device; what was there before is intact"):
        write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old" and names(tmp_path) == ["a"]


def test_nan_is_not_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a", float("nan"))
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot read"), (b"{", "not valid JSON"), (b"\xff", "not valid")]
)
def test_a_json_file_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "a").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_json(tmp_path / "a")


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    for content in ("old", "new"):
        with replaced_folder(tmp_path / "c") as folder:
            (folder / content).write_text(content)
    assert names(tmp_path) == ["c"] and names(tmp_path / "c") == ["new"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error")])
def test_a_folder_that_cannot_be_filled_leaves_the_old_one(tmp_path: Path, error: Exception) -> None:
    with replaced_folder(tmp_path / "c") as folder:
        (folder / "old").write_text("old")
    with pytest.raises(UserError, match="what was there before is intact"), replaced_folder(tmp_path / "c") as folder:
        (folder / "new").write_text("new")
        raise error
    assert names(tmp_path) == ["c"] and names(tmp_path / "c") == ["old"]


def test_a_folder_whose_last_rename_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with replaced_folder(tmp_path / "c") as folder:
        (folder / "old").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left"), replaced_folder(tmp_path / "c") as folder:
        (folder / "new").write_text("new")
    assert names(tmp_path) == ["c"] and names(tmp_path / "c") == ["old"]


def test_a_link_leads_to_the_folder_that_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "disk" / "out").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "out")
    with replaced_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
    assert (tmp_path / "out").is_symlink() and (tmp_path / "disk" / "out" / "a").read_text() == "1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out"]


def test_the_current_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="the current folder was given"), replaced_folder("."):
        pass
    assert not list(tmp_path.iterdir())


def test_a_kill_between_the_two_renames_is_mended(tmp_path: Path) -> None:
    (tmp_path / ".c.old").mkdir()
    (tmp_path / ".c.old" / "old").touch()
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    (tmp_path / f".c.{int(gone.stdout)}.new").mkdir()
    recover_folder(tmp_path / "c")
    assert names(tmp_path) == ["c"] and names(tmp_path / "c") == ["old"]


def test_a_kill_after_the_two_renames_is_mended(tmp_path: Path) -> None:
    for name in ("c", ".c.old"):
        (tmp_path / name).mkdir()
    (tmp_path / "c" / "new").touch()
    recover_folder(tmp_path / "c")
    assert names(tmp_path) == ["c"] and names(tmp_path / "c") == ["new"]


def test_a_locked_folder_is_refused_to_others_until_its_process_ends(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom attnres.files import locked\n"
        "with locked(sys.argv[1]):\n    open(sys.argv[1] + '/a', 'w').close(); print(flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "run")], stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout is not None and holder.stdout.readline()
        with pytest.raises(UserError, match="another process is working in"), locked(tmp_path / "run"):
            pass
        holder.kill()
    with locked(tmp_path / "run"):
        assert names(tmp_path / "run") == [".lock", "a"]


def test_a_lock_leaves_no_empty_folder(tmp_path: Path) -> None:
    with locked(tmp_path / "deep" / "run"):
        assert names(tmp_path / "deep" / "run") == [".lock"]
    assert names(tmp_path) == []


def test_what_a_killed_process_left_of_a_file_goes_when_it_is_written(tmp_path: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    stray, alive = tmp_path / f".a.png.{dead.stdout.strip()}.new", tmp_path / ".a.png.1.new"
    other = tmp_path / f".b.png.{dead.stdout.strip()}.new"
    for path in (stray, alive, other):
        path.touch()
    write_bytes(tmp_path / "a.png", b"picture")
    assert names(tmp_path) == sorted([alive.name, other.name, "a.png"])


def test_a_folder_that_cannot_be_made_is_not_locked(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"), locked(tmp_path / "file" / "run"):
        pass


def test_what_a_killed_process_left_is_removed_by_the_next_that_works_there(tmp_path: Path) -> None:
    gone = subprocess.run(
        [sys.executable, "-S", "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    number = int(gone.stdout)
    (tmp_path / "val").mkdir()
    strays = [tmp_path / f".config.json.{number}.new", tmp_path / "val" / f".000004.npy.{10**22}.new"]
    others = [tmp_path / ".config.json.new", tmp_path / f".a.{os.getppid()}.new", tmp_path / "val" / "a.new"]
    others.append(tmp_path / f".b.another-node-{number}.new")  # a process of another machine may be alive
    for path in (*strays, *others):
        path.touch()
    with locked(tmp_path):
        assert not any(path.exists() for path in strays) and all(path.exists() for path in others)
    assert names(tmp_path) == sorted([*(path.name for path in others[:2]), others[3].name, "val"]), "no lock is left"


BEGIN = """
import os, socket, sys
socket.gethostname = lambda: sys.argv[2]
from attnres.files import locked, replaced_folder
with replaced_folder(sys.argv[1]) as folder:
    folder.joinpath("a").touch()
    os._exit(0)
"""
CLEAN = "import socket, sys\nsocket.gethostname = lambda: sys.argv[2]\nfrom attnres.files import recover_folder\n"
CLEAN += "recover_folder(sys.argv[1])"


def test_machines_whose_names_begin_alike_leave_each_others_writers_alone(tmp_path: Path) -> None:
    """On a file system that they share; whether a process of another one lives cannot be told."""
    nodes = [f"compute-cluster-west-{number}" for number in (1, 2)]
    for script, node, left in ((BEGIN, nodes[0], 1), (CLEAN, nodes[1], 1), (CLEAN, nodes[0], 0)):
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "c"), node], check=True)
        assert len(names(tmp_path)) == left, node


@pytest.mark.parametrize("at", [1, 2])
def test_a_second_interrupt_between_the_two_renames_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    with replaced_folder(tmp_path / "c") as folder:
        (folder / "old").touch()
    rename, count = Path.rename, 0

    def interrupted(self: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count == at:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), replaced_folder(tmp_path / "c") as folder:
        (folder / "new").touch()
    assert names(tmp_path) == ["c"] and names(tmp_path / "c") == ["old"]


def test_a_file_that_is_not_there_is_the_one_that_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*missing: No such file"), replaced_folder(tmp_path / "c") as new:
        copy_files({"tokenizer.json": tmp_path / "missing"}, new)
    assert names(tmp_path) == []


def test_a_file_in_the_place_of_an_old_folder_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / ".c.old").touch()
    with replaced_folder(tmp_path / "c") as folder:
        (folder / "new").touch()
    assert names(tmp_path) == ["c"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_of_a_folder_can_be_read_by_whom_the_umask_lets(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with replaced_folder(tmp_path / "c") as folder:
            (folder / "weights").touch(mode=0o600)
            (folder / "text").touch()
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "c").iterdir()} == {0o666 & ~umask}


def test_whether_a_locked_folder_is_still_there_is_told(tmp_path: Path) -> None:
    with locked(tmp_path / "run") as in_place:
        assert in_place()
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        assert not in_place()
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / ".lock").touch()
        assert not in_place(), "another one of the same name"
    assert names(tmp_path / "run") == [".lock"], "it is not ours to remove"


def test_waiting_for_a_lock_outlasts_the_one_that_removes_its_file(tmp_path: Path) -> None:
    held, order = threading.Event(), []

    def second() -> None:
        held.wait()
        with lock(tmp_path / "a.lock", wait=True):
            order.append("second")

    other = threading.Thread(target=second)
    other.start()
    with lock(tmp_path / "a.lock", wait=True):
        held.set()
        with pytest.raises(Taken), lock(tmp_path / "a.lock", wait=False):
            pass
        order.append("first")
    other.join()
    assert order == ["first", "second"] and names(tmp_path) == []


def test_a_name_that_is_too_long_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="File name too long"):
        write_text(tmp_path / ("x" * 250), "text")
