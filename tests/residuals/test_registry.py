"""Mechanisms by name: those that ship, those of a class, those of a file; a mistake is one sentence."""

import pickle
import sys

import pytest
import torch

from attnres import UserError
from attnres.comparison.plan import parse_variant
from attnres.residuals import (
    RESIDUALS,
    Residual,
    Traits,
    make_residual,
    register,
    registry,
    residual_class,
    source_file,
)
from attnres.residuals.mechanisms.standard import Standard
from attnres.residuals.registry import PLUGINS, plugins, ships

pytestmark = pytest.mark.usefixtures("registered")
MINE = '''
from attnres.residuals.mechanisms.standard import Standard


class Mine(Standard):
    """h = {factor} x."""

    name = "mine"
    factor = {factor}

    def __init__(self, num_sublayers, width, *, scale: float = 1.0):
        super().__init__(num_sublayers, width)


class Nameless:
    """No mechanism."""
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE.format(factor=1.0))
    return path


def test_a_class_is_known_by_its_name_and_may_be_replaced():
    one, two = (type("Mine", (Standard,), {"name": "mine"}) for _ in range(2))
    assert register(one) is one and residual_class("mine") is one and RESIDUALS["mine"] is one
    assert register(two) is two and residual_class("mine") is two
    assert not ships("mine") and ships("standard") and not ships("nothing") and source_file("mine") is None


def test_what_is_no_mechanism_is_refused():
    class Unfinished(Residual):
        name = "unfinished"
        traits = Traits(False, False, False, False)
        start = Standard.start

    for mechanism, message in (
        (torch.nn.Linear, "no mechanism: expected a subclass"),
        ("block", "no mechanism: expected a subclass"),
        (type("Mine", (Standard,), {"name": "my own"}), "has the name 'my own'"),
        (type("Mine", (Standard,), {"name": "block"}), "'block' is the name of a mechanism of attnres"),
        (type("Mine", (Standard,), {"name": "mine", "traits": None}), "has no traits"),
        (Unfinished, "does not define read"),
    ):
        with pytest.raises(UserError, match=message):
            register(mechanism)
    assert "mine" not in RESIDUALS and RESIDUALS["block"].__name__ == "Block"


def test_a_file_is_read_once_and_again_when_it_changed(file, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # what was kept for the first content is not for the second
    mechanism = residual_class(f"{file}:Mine")
    assert residual_class(f"{file}:Mine") is mechanism is residual_class("mine")
    assert source_file("mine") == f"{file}:Mine" == plugins()
    residual = pickle.loads(pickle.dumps(make_residual("mine", 2, 8, scale=2.0)))
    assert type(residual) is mechanism
    file.write_text(MINE.format(factor=2.0))
    assert residual_class("mine").factor == 1.0 and residual_class(f"{file}:Mine").factor == 2.0
    assert residual_class("mine").factor == 2.0


@pytest.mark.parametrize(
    ("content", "label", "message"),
    [
        (None, "Mine", "there is no file"),
        (MINE.format(factor=1), "Mnie", "did you mean 'Mine'"),
        (MINE.format(factor=1), "Nameless", "no mechanism: expected a subclass"),
        ("import nothing_of_this_name", "Mine", "cannot be run .ModuleNotFoundError"),
        ("class Mine(", "Mine", "cannot be run .SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_read(file, content, label, message):
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(UserError, match=message):
        residual_class(f"{file}:{label}")


def test_the_environment_names_files_that_names_are_looked_up_in(file, monkeypatch):
    with pytest.raises(UserError, match="unknown residual 'mine'"):
        residual_class("mine")
    monkeypatch.setenv(PLUGINS, f"{file}:Mine")
    assert residual_class("mine").__name__ == "Mine"
    registry._MECHANISMS.pop("mine")
    monkeypatch.setenv(PLUGINS, f"{file}:Mine;{file.parent / 'other.py'}:Other")
    with pytest.raises(UserError, match=r"no file .*other\.py"):
        residual_class("mine")
    monkeypatch.setenv(PLUGINS, "mine")
    with pytest.raises(UserError, match=f"the environment variable {PLUGINS} has 'mine': expected FILE.py:CLASS"):
        residual_class("mine")


def test_what_something_stored_says_is_told_and_not_run(file):
    with pytest.raises(UserError, match=rf"{file}:Mine, which is not run unasked.*{PLUGINS}={file}:Mine"):
        residual_class("mine", f"{file}:Mine")
    assert "mine" not in RESIDUALS


def test_a_variant_may_be_of_a_file(file):
    plain, training = parse_variant(f"{file}:Mine"), parse_variant(f"{file}:Mine:scale=2@lr=0.1")
    assert (plain.label, plain.file) == ("mine", f"{file}:Mine")
    assert (training.label, training.settings, training.lr) == ("mine-scale2-lr0.1", {"scale": 2}, 0.1)
    with pytest.raises(UserError, match="unknown setting of residual 'mine' 'scael': did you mean 'scale'"):
        parse_variant(f"{file}:Mine:scael=2")


@pytest.mark.parametrize("kind", ["fixed", "layer", "first"])
def test_a_residual_whose_values_are_mixed_is_no_standard_one(kind):
    """A control with mixed values is a mechanism like others, not chance."""
    assert make_residual("rescaled", 4, 16).traits.is_chance
    traits = make_residual("rescaled", 4, 16, value_residual=kind).traits
    assert traits.is_control and not traits.is_chance and not traits.starts_standard
    assert RESIDUALS["rescaled"].traits.is_chance


@pytest.mark.parametrize("name", RESIDUALS)
def test_every_mechanism_can_be_pickled(name):
    residual = make_residual(name, 4, 16)
    again = pickle.loads(pickle.dumps(residual))
    assert again.layout() == residual.layout()
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), residual.parameters(), strict=True))
