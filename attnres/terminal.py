"""Lines and tables in the terminal."""

from rich.console import Console
from rich.table import Table


def wide(console: Console | None = None) -> Console:
    """The console to print on; a file or a pipe has no edge to wrap at. What is in brackets is a token, no markup."""
    console = console or Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = 400
    return console


def say(console: Console, line: str) -> None:
    """Print a line of text that is no markup."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def grid(*left: str, right: tuple[str, ...] = ()) -> Table:
    """A table without lines: columns that are flush left, then some that are flush right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in left:
        table.add_column(title)
    for title in right:
        table.add_column(title, justify="right")
    return table
