"""A command writes into a folder that is new, empty or of its own kind, and replaces nothing of another."""

import json
from pathlib import Path

import pytest

from attnres.errors import UserError
from attnres.folders import kind_of, refuse_other, refuse_other_file

KINDS = {
    "comparison": {"compare.json": {}},
    "prepared data": {"header.json": {}},
    "run": {"config.json": {"optim": {}}, "inspection.json": {}, "report.html": {}},
    "model": {"config.json": {"model_type": "qwen3"}},
    "inspection": {"inspection.json": {}},
    "figures": {"captions.md": {}},
    "report": {"report.html": {}},
    "other": {"notes.txt": {}},
}


def fill(folder: Path, kind: str) -> Path:
    folder.mkdir()
    for name, value in KINDS[kind].items():
        (folder / name).write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_written_into_by_its_own_kind_alone(tmp_path: Path, kind: str) -> None:
    folder = fill(tmp_path / "a", kind)
    assert kind_of(folder) == kind
    for other in set(KINDS) - {"other"}:
        if other == kind:
            assert refuse_other(folder, other) == folder
        else:
            with pytest.raises(UserError, match=r"is not empty and holds .*: expected an empty folder or "):
                refuse_other(folder, other)
    with pytest.raises(UserError, match="expected an empty folder, choose another"):
        refuse_other(folder)


def test_a_new_folder_and_one_with_a_lock_or_what_a_killed_command_began_are_empty(tmp_path: Path) -> None:
    assert kind_of(tmp_path / "new") is None and refuse_other(tmp_path / "new") == tmp_path / "new"
    (tmp_path / ".lock").touch()
    (tmp_path / ".inspection.json.4711.new").touch()
    assert kind_of(tmp_path) is None and refuse_other(tmp_path, "run") == tmp_path


def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file: expected a folder"):
        refuse_other(tmp_path / "file")
    with pytest.raises(UserError, match=r"cannot write into .*deep: .*file is no folder"):
        refuse_other(tmp_path / "file" / "deep")
    with pytest.raises(UserError, match="an empty name was given"):
        refuse_other(" ")


def test_a_file_is_replaced_by_its_own_command_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert refuse_other_file(path, {"tasks"}, "a.items.jsonl") == path
    (tmp_path / "a.items.jsonl").touch()
    with pytest.raises(UserError, match=r"a\.items\.jsonl exists and would be replaced"):
        refuse_other_file(path, {"tasks"}, "a.items.jsonl")
    path.write_text('{"tasks": {}}')
    assert refuse_other_file(path, {"tasks"}, "a.items.jsonl") == path
    for text in ('{"steps": 7}', "[]", "no JSON"):
        path.write_text(text)
        with pytest.raises(UserError, match="no earlier result of this command"):
            refuse_other_file(path, {"tasks"})
        assert path.read_text() == text
