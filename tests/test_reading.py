"""Every file of plain values is read within limits, and what is wrong with one is a sentence that names it."""

import os
import re
from pathlib import Path

import pytest

from attnres.errors import UserError
from attnres.files import user_path
from attnres.reading import MAX_DEPTH, parse_json, parse_yaml, read_config, read_json, read_text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ('{"a": NaN}', "NaN is no number of JSON"),
        ('{"a": 1e400}', "1e400 is no finite number"),
        ('{"a": 1, "a": 2}', "the key 'a' stands twice"),
        ('{"a": ' + "7" * 5000 + "}", "is not valid JSON"),
        ("[" * 100_000, "nested more than 64 deep"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested more than 64 deep"),
    ],
)
def test_json_that_nobody_writes_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^here .*{message}") as raised:
        parse_json(text, "here")
    assert "\n" not in str(raised.value)


def test_json_of_others_may_have_what_ours_never_has() -> None:
    assert parse_json('{"a": 1, "a": Infinity}', "here", ours=False) == {"a": float("inf")}
    depth = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(depth, "here") == parse_json(depth, "here", ours=False)
    with pytest.raises(UserError, match="nested more than 64 deep"):
        parse_json("[" * 100_000, "here", ours=False)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("-.5", -0.5),
        ("010", 10),
        ("0x1f", 31),
        ("0o17", 15),
        ("1:30:00", "1:30:00"),
        ("no", "no"),
        ("2024-01-01", "2024-01-01"),
        ("True", True),
        ("~", None),
        ("", None),
        ("[1, 2.5, a, null]", [1, 2.5, "a", None]),
        ("a: {b: [c]}", {"a": {"b": ["c"]}}),
    ],
)
def test_yaml_is_that_of_version_1_2(text: str, value: object) -> None:
    assert parse_yaml(text, "here") == value and type(parse_yaml(text, "here")) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "the key 'a' stands twice at line 2, column 1"),
        ("a: &x [1]\nb: *x", r"aliases \(\*name\) are not read at line 2"),
        ("a: [1", "is not valid YAML: "),
        ("? [a]\n: 1", "is not valid YAML: found unhashable key"),
        ("!!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("a: \x07", "is not valid YAML: "),
        ("a: " + "7" * 5000, "is not valid YAML: "),
        ("[" * 3000, "nested more than 64 deep"),
    ],
)
def test_yaml_that_cannot_be_meant_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^here .*{message}") as raised:
        parse_yaml(text, "here")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a = ", "is not valid TOML"), ("a = " + "[" * 3000, "nested more than 64"), (f"a = {'7' * 5000}", "TOML")],
)
def test_toml_that_cannot_be_read_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(UserError, match=f"the configuration file .*a.toml .*{message}"):
        read_config(tmp_path / "a.toml")


@pytest.mark.parametrize(
    ("name", "text"), [("a.yaml", ""), ("a.yaml", "# steps: 5\n"), ("a.toml", "\n"), ("a.json", "{}")]
)
def test_a_configuration_without_values_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=rf"{name} is empty: expected keys and values; without --config the defaults"):
        read_config(tmp_path / name)


def test_only_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(UserError, match=r"a\.json is a pipe: expected a file"):
        read_json(tmp_path / "a.json")
    with pytest.raises(UserError, match="/dev/null is a device"):
        read_json("/dev/null")
    with pytest.raises(UserError, match=r"cannot read .*: Is a directory"):
        read_json(tmp_path)


@pytest.mark.parametrize("name", ["a.json", "a.yaml", "a.toml", "a.txt"])
def test_a_mark_is_no_text_and_other_encodings_are_told(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    text = {".toml": 'a = "b"\r\n', ".json": '{"a": "b"}', ".yaml": "a: b\n", ".txt": "a\r\nb"}[path.suffix]
    path.write_bytes(text.encode("utf-8-sig"))
    assert read_text(path) == text.replace("\r", "") and (name == "a.txt" or read_config(path) == {"a": "b"})
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32-le"):
        path.write_bytes(text.encode(encoding))
        with pytest.raises(UserError, match="is UTF-16, or no text at all"):
            read_text(path)
    path.write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="is not valid UTF-8"):
        read_text(path)


def test_a_configuration_is_no_larger_than_somebody_types(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("#" * (1 << 20) + "\n")
    with pytest.raises(UserError, match=r"has 1,048,577 bytes: expected at most 1,048,576"):
        read_config(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("name", "message"),
    [("a" * 300, "File name too long"), ("a\0b", "null byte"), ("\ud800", "surrogates"), ("~nobody/x/y", "home")],
)
def test_a_name_that_no_file_can_have_is_refused(name: str, message: str) -> None:
    if name.startswith("~"):
        name = "~no-such-user-here/x"
    with pytest.raises(UserError, match=message):
        user_path(name)


def test_a_home_that_cannot_be_told_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    with pytest.raises(UserError, match=re.escape("'~/.cache' begins with an unknown home folder")):
        user_path("~/.cache")


@pytest.mark.parametrize(("name", "text"), [("a.yaml", "lr: .nan"), ("a.yml", "lr: -.inf"), ("a.toml", "lr = nan")])
def test_a_configuration_has_finite_numbers(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match="no finite number"):
        read_config(tmp_path / name)
