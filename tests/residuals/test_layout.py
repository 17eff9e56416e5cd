"""Reads described as data: round trips, order of columns, and what earlier versions wrote."""

import json

import pytest
from sample_mechanisms import crossed

from attnres.residuals import Read, Source, columns, depths, layout_of, make_residual

EVERY = pytest.mark.parametrize("name", crossed())


@EVERY
@pytest.mark.parametrize("sublayers", [1, 2, 7, 12])
def test_a_layout_survives_json(name, sublayers):
    layout = make_residual(name, sublayers, 8).layout()
    assert sorted(set(depths(layout))) == list(range(sublayers + 1)) and layout[-1].name == "output"
    assert tuple(Read.from_json(json.loads(json.dumps(read.to_json()))) for read in layout) == layout


@EVERY
def test_names_of_a_reads_sources_are_different_and_finished_ones_come_first(name):
    for read in make_residual(name, 12, 8).layout():
        names = [source.name for source in read.sources]
        assert len(set(names)) == len(names)
        opens = [source.open for source in read.sources]
        assert opens == sorted(opens)


def test_names_alone_give_back_kinds_and_numbers():
    layout = make_residual("block", 12, 8, block_size=4).layout()
    written = {
        "reads": [read.name for read in layout],
        "sources": [[source.name for source in read.sources] for read in layout],
    }
    for read, again in zip(layout, layout_of(written), strict=True):
        assert (again.kind, again.number) == (read.kind, read.number)
        assert [s[:2] + s[3:4] for s in again.sources] == [s[:2] + s[3:4] for s in read.sources]


def test_a_recordings_layout_is_the_mechanisms():
    layout = make_residual("boundary", 12, 8, block_size=4).layout()
    assert layout_of({"layout": [read.to_json() for read in layout]}) == layout


@pytest.mark.parametrize("value", [{}, {"reads": ["output"]}, {"layout": [3]}, {"layout": [{"kind": "output"}]}, []])
def test_another_value_is_refused_by_an_exception_that_readers_expect(value):
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        layout_of(value)


def test_columns_stand_in_order_of_depth_and_what_is_open_last():
    rows = [read.sources for read in make_residual("block", 6, 8, block_size=2, null_source=True).layout()]
    assert [s.short for s in columns(rows)] == ["emb", "b1", "b2", "b3", "part", "0"]
    rows = [read.sources for read in make_residual("cumulative", 6, 8, block_size=2).layout()]
    assert [s.short for s in columns(rows)] == ["emb", "s2", "s4", "str"]


def test_a_kind_of_a_mechanisms_own_has_names_too():
    source = Source("crossing", 3, range(2, 4))
    assert (source.name, source.short, source.meaning) == ("crossing 3", "cros3", "crossing")


def test_layers_of_three_sublayers_and_reads_of_projections_have_names():
    residual = make_residual("full", 6, 8, sublayers=("attention", "cross", "mlp"))
    layout = residual.layout()
    assert [read.name for read in layout[:4]] == ["attention 0", "cross 0", "mlp 0", "attention 1"]
    assert [source.name for source in layout[3].sources] == ["embedding", "attention 0", "cross 0", "mlp 0"]
    assert Read("attention", 2, (), into="key").name == "attention 2 key"
