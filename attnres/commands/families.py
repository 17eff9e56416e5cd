"""`attnres families`: which decoders convert."""

from dataclasses import dataclass

from attnres.flags import parse


@dataclass
class Families:
    """Print which families of decoders convert, how exactly, and what is refused and why."""


def run(arguments: list[str]) -> None:
    """Parse the arguments after the command's name and carry them out."""
    parse("families", Families, arguments)

    from rich.table import Table

    from attnres.models import families_table
    from attnres.progress import wide

    table = Table("family", "model types", "converts", "", title="Decoders that depth reads go into")
    for row in families_table():
        table.add_row(row.family, ", ".join(row.model_types), row.kind, row.note)
    wide().print(table)
    print("Others are probed: what follows a pre-norm decoder's pattern converts, verified by its logits.")
