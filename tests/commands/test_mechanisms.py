"""`attnres mechanisms` and the table of the documentation."""

import json
from pathlib import Path

from attnres import cli
from attnres.residuals import RESIDUALS, make_residual
from attnres.residuals.registry import ships
from attnres.residuals.table import SUBLAYERS, WIDTH, as_markdown, mechanisms

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "mechanisms.md"


def test_every_mechanism_that_ships_says_what_it_is():
    rows = [row for row in mechanisms() if ships(row.name)]
    assert [row.name for row in rows] == [name for name in RESIDUALS if ships(name)]
    for row in rows:
        assert all((row.rule, row.start, row.moves, row.source)), row.name
        assert row.parameters == sum(p.numel() for p in make_residual(row.name, SUBLAYERS, WIDTH).parameters())


def test_the_table_of_the_documentation_is_the_commands():
    table = DOCS.read_text().partition("<!-- table -->")[2].partition("<!-- end -->")[0].strip()
    assert table == as_markdown([row for row in mechanisms() if ships(row.name)]), (
        "put the output of `attnres mechanisms --format markdown` between the marks of docs/reference/mechanisms.md"
    )


def test_the_command_prints_a_table_one_at_length_and_json(capsys):
    cli.main(["mechanisms"])
    assert "denseformer" in capsys.readouterr().out
    cli.main(["mechanisms", "block"])
    printed = capsys.readouterr().out
    assert "num_blocks=None" in printed and "Block Attention" not in printed and "embedding b_0" in printed
    cli.main(["mechanisms", "full", "standard", "--format", "json"])
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} == {"full", "standard"}
