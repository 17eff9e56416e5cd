"""`attnres app` says what is wrong in one sentence before it serves anything."""

import importlib.util
import socket

import pytest

from attnres.cli import main


@pytest.fixture
def port():
    """A port that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def refused(capsys, monkeypatch):
    """Runs the command, which must refuse; gives its sentence."""
    find = importlib.util.find_spec
    there = ("starlette", "uvicorn")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name if name in there else find(name, *rest))

    def run(*arguments):
        with pytest.raises(SystemExit) as left:
            main(["app", *map(str, arguments)])
        out, error = capsys.readouterr()
        assert left.value.code == 2 and out == ""
        lines = [line for line in error.splitlines() if line.startswith("attnres: error: ")]
        assert len(lines) == 1
        return lines[0]

    return run


def test_a_port_in_use(refused, folders):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        words = refused(folders["block"], "--port", number)
    assert f"cannot serve on 127.0.0.1:{number}" in words and "choose another --port" in words


def test_addresses_that_cannot_be(refused, folders, port):
    assert "expected 0 to 65535" in refused(folders["block"], "--port", -1)
    assert "expected 0 to 65535" in refused(folders["block"], "--port", 70000)
    assert "--host of this machine" in refused(folders["block"], "--port", port, "--host", "192.0.2.1")


def test_models_that_cannot_be_shown(refused, folders, tmp_path, port):
    assert "holds no model" in refused(tmp_path, "--port", port)
    assert "does not exist" in refused(tmp_path / "none", "--port", port)
    assert "one, or two" in refused("a", "b", "c", "--port", port)
    assert "does not exist" in refused(folders["block"], "--corpus", tmp_path / "none", "--port", port)
    assert "deepnorm" in refused(folders["deepnorm"], "--port", port)


def test_no_server(refused, folders, port, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'attention-residuals[app]'" in refused(folders["block"], "--port", port)
