"""The C kernels are built anew when what they are made of changes, once for all who ask; a failure has a reason."""

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from attnres.ops import cpu_build

COMPILER = shutil.which(os.environ.get("CC", "cc"))
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that notes what it is asked, and whose version is in a file; the cache is an empty folder."""
    script = tmp_path / "compiler"
    script.write_text(
        "#!/bin/sh\nset -e\n"
        f'if [ "$1" = --version ]; then cat {tmp_path}/version; exit; fi\n'
        f'echo "$*" >> {tmp_path}/calls\nsleep 0.5\nexec {COMPILER} -O0 "$@" -O0\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "version").write_text("1.0")
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setenv("ATTNRES_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ATTNRES_CPU_KERNELS", raising=False)
    return script


def libraries(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache" / "kernels").glob("*.so")}


def test_the_library_is_built_once_and_found_again(compiler, tmp_path):
    build = cpu_build.library.__wrapped__
    assert isinstance(build(), ctypes.CDLL) and isinstance(build(), ctypes.CDLL)
    assert len((tmp_path / "calls").read_text().splitlines()) == 2  # one to compile, one to link
    assert len(libraries(tmp_path)) == 1


@pytest.mark.long
def test_processes_that_ask_at_once_build_it_once(compiler, tmp_path):
    code = "from attnres.ops.cpu_build import library; import sys; sys.exit(isinstance(library(), str))"
    asking = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait() for process in asking] == [0, 0, 0]
    assert len((tmp_path / "calls").read_text().splitlines()) == 2


def test_flags_compiler_version_and_openmp_change_the_key(compiler, tmp_path, monkeypatch):
    def key():
        return cpu_build._key([str(compiler)], cpu_build.torch_openmp())

    keys = [key(), key()]
    monkeypatch.setattr(cpu_build, "_FLAGS", (*cpu_build._FLAGS, "-DMORE"))
    keys.append(key())
    (tmp_path / "version").write_text("1.1")
    keys.append(key())
    monkeypatch.setattr(cpu_build, "torch_openmp", lambda: [Path("libgomp-other.so.1")])
    keys.append(key())
    assert keys[0] == keys[1] and len(set(keys)) == 4


def test_a_folder_that_others_may_write_to_is_left_alone(compiler, tmp_path):
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert isinstance(cpu_build.library.__wrapped__(), str)
    assert not list(folder.iterdir())


def test_nothing_is_left_for_a_group_to_write_to(compiler, tmp_path):
    before = os.umask(0o002)
    try:
        assert isinstance(cpu_build.library.__wrapped__(), ctypes.CDLL)
    finally:
        os.umask(before)


def test_a_compiler_may_come_with_words(compiler, monkeypatch):
    monkeypatch.setenv("CC", f"env {compiler}")
    assert isinstance(cpu_build.library.__wrapped__(), ctypes.CDLL)


ARM = "processor\t: 0\nFeatures\t: fp asimd {more}\nCPU implementer\t: 0x41\nCPU part\t: {part}\n"


def test_processors_of_other_kinds_have_other_keys(monkeypatch):
    """/proc/cpuinfo as Linux writes it on ARM, which has neither a model's name nor flags."""
    keys = set()
    for more, part in (("sve", "0xd40"), ("", "0xd0c"), ("sve", "0xd4f")):
        monkeypatch.setattr(Path, "read_text", lambda self, more=more, part=part: ARM.format(more=more, part=part))
        keys.add(cpu_build._processor())
    assert len(keys) == 3


def test_why_there_are_no_kernels_is_said(compiler, monkeypatch):
    build = cpu_build.library.__wrapped__
    monkeypatch.setattr(cpu_build, "_FLAGS", ("-no-such-flag",))
    assert "do not build with" in build() and "-no-such-flag" in build()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "no C compiler 'no-such-compiler'" in build()
    monkeypatch.setattr(cpu_build.platform, "system", lambda: "Windows")
    assert build() == "the C kernels are built on Linux, not on Windows"
    monkeypatch.setenv("ATTNRES_CPU_KERNELS", "0")
    assert build() == "ATTNRES_CPU_KERNELS is 0" and cpu_build.turned_off()


def test_a_library_that_others_could_have_put_there_is_not_loaded(compiler, tmp_path, monkeypatch):
    build = cpu_build.library.__wrapped__
    assert isinstance(build(), ctypes.CDLL)
    folder = tmp_path / "cache" / "kernels"
    for mode in (0o777, 0o770):
        folder.chmod(mode)
        assert build() == f"the C kernels in {folder} could be put there by another user"
    folder.chmod(0o755)
    (built,) = folder.glob("*.so")
    built.chmod(0o775)
    assert build() == f"the C kernels in {built} could have been put there by another user"
    built.chmod(0o755)
    uid = os.geteuid()
    if uid == 0:  # who alone gives files away
        for path, could in ((folder, "could be"), (built, "could have been")):
            os.chown(path, 1, -1)
            assert build() == f"the C kernels in {path} {could} put there by another user"
            os.chown(path, 0, -1)
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert isinstance(build(), ctypes.CDLL) is (uid == 0), "root's are trusted"


def test_a_home_that_cannot_be_told_is_a_reason(compiler, monkeypatch):
    for name in ("ATTNRES_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    assert "this user has no home folder" in cpu_build.library.__wrapped__()
