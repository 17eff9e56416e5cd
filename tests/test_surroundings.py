"""The command line wherever it runs: folders of any name, terminals of any encoding, systems that refuse something."""

import errno
import io
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tiny import SIZE

import attnres
from attnres import cli

COMMANDS = """\
import json, sys
from attnres.cli import main
import attnres.training

for arguments in json.loads(sys.argv[1]):
    main(arguments)

def train(config, *, progress):
    raise KeyError("a bug")

attnres.training.train = train
main(["train"])
"""


@pytest.mark.long
def test_a_copy_in_folders_of_any_name_runs_in_a_bare_locale_and_says_where_a_bug_is(tmp_path):
    clone = tmp_path / "attnres" / "a b" / "attnres"
    shutil.copytree(Path(attnres.__file__).parent, clone / "attnres", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "link").symlink_to(clone, target_is_directory=True)
    script = clone / "script.py"
    script.write_text(COMMANDS)
    (clone / "text.txt").write_text("na\u00efve caf\u00e9 \u4f60\u597d \u2212 \u00b1 " * 400, encoding="utf-8")
    options = ["--steps", "2", "--seq-len", "16", "--batch-size", "2", "--no-progress", "--tokenizer", "bpe:280"]
    commands = [
        ["train", "--source", "text.txt", "--size", json.dumps(SIZE), *options, "--out", "my runs/one"],
        ["report", "my runs/one", "--images", "png"],
        ["generate", "my runs/one", "--prompt", "caf\u00e9 \u4f60", "--max-new-tokens", "2", "--show-depth"],
    ]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "PYTHON", "ATTNRES"))}
    variables |= {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONPATH": str(tmp_path / "link"),
        "HOME": str(tmp_path / "no home"),
        "USER": "",
        "TZ": "Pacific/Kiritimati",
        "TERM": "dumb",
        "COLUMNS": "0",
        "MPLBACKEND": "module://a_notebook.backend",
    }
    words = [sys.executable, str(script), json.dumps(commands)]
    done = subprocess.run(words, cwd=clone, env=variables, umask=0o077, capture_output=True)
    errors = done.stderr.decode("ascii")
    assert done.returncode == 1, errors
    assert errors.count("error: ") == 1 and "unforeseen KeyError at train.py:" in errors, errors
    assert "torchao" not in errors and "register_constant" not in errors
    written = clone / "my runs" / "one"
    assert (written / "report.html").is_file() and list(written.glob("figures/*.png"))
    assert {path.stat().st_mode & 0o077 for path in written.rglob("*")} == {0}


@pytest.mark.quick("ascii-strict")
@pytest.mark.parametrize(
    ("encoding", "errors"),
    [*((name, "strict") for name in ("ascii", "latin-1", "cp1252", "utf-8")), ("ascii", "surrogateescape")],
)
def test_no_sign_is_too_much_for_a_terminal(folders, tmp_path, monkeypatch, encoding, errors):
    text = tmp_path / "text.txt"
    text.write_text("na\u00efve caf\u00e9 \u4f60\u597d \u2212 \u00b1 " * 30, encoding="utf-8")
    model = str(folders["block"])
    for arguments in (
        ["generate", model, "--prompt", "caf\u00e9 \u4f60", "--max-new-tokens", "2", "--greedy"],
        ["inspect", model, "--text", "caf\u00e9 \u4f60"],
        ["search", model, "embedding@mlp0", "--corpus", str(text)],
        ["eval", model, "--tasks", str(text)],
    ):
        printed = io.BytesIO()
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, encoding=encoding, errors=errors))
        cli.main(arguments)
        sys.stdout.flush()
        assert printed.getvalue().decode(encoding)


def refused(capsys, monkeypatch, act):
    """What `attnres` says, with status 2, where training does this."""
    monkeypatch.setattr("attnres.training.train", lambda config, *, progress: act())
    with pytest.raises(SystemExit) as left:
        cli.main(["train"])
    message = capsys.readouterr().err
    assert left.value.code == 2 and message.count("\n") == 1, message
    return message


def test_too_many_open_files_are_said_with_the_limit(capsys, monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def act():
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            Path(os.devnull).read_bytes()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert "ulimit -n" in refused(capsys, monkeypatch, act)


def test_a_system_without_a_temporary_folder_is_told_of_tmpdir(capsys, monkeypatch):
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/absent"])
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert "TMPDIR" in refused(capsys, monkeypatch, tempfile.mkdtemp)


def test_a_current_folder_that_was_removed_is_told(capsys, monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "current folder" in refused(capsys, monkeypatch, Path.cwd)


def test_a_name_that_the_locale_cannot_write_is_told(capsys, monkeypatch):
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "latin-1")
    assert "PYTHONUTF8=1" in refused(capsys, monkeypatch, lambda: "\u4f60".encode("latin-1"))


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (OSError(errno.EROFS, "Read-only file system", "/home/me/.cache"), "/home/me/.cache"),
        (PermissionError(errno.EACCES, "Permission denied", "/home/me"), "ATTNRES_CACHE"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "ulimit -u"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
    ],
)
def test_what_a_system_refuses_is_no_mistake_of_ours(capsys, monkeypatch, error, word):
    def act():
        raise error

    message = refused(capsys, monkeypatch, act)
    assert word in message and "mistake" not in message


def test_what_an_import_of_torchao_logs_is_no_line_and_other_warnings_are(capsys, caplog):
    cli.main(["--version"])
    quantiser, tree = logging.getLogger("torchao"), logging.getLogger("torch.utils._pytree")
    quantiser.warning("Failed to load %s: it is for another machine", "_C.so")
    tree.warning("%s is an Enum. Calling register_constant() on Enum subclasses is deprecated", "<enum 'A'>")
    assert not caplog.records
    quantiser.warning("too old")
    tree.warning("too deep")
    assert [record.message for record in caplog.records] == ["too old", "too deep"]
