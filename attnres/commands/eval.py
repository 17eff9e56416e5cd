"""`attnres eval`: perplexity and tasks."""

from dataclasses import dataclass
from pathlib import Path

from attnres.errors import UserError
from attnres.evals.config import EvalConfig
from attnres.flags import fields_of, parse


@dataclass
class Eval(EvalConfig):
    """Score models on text and tasks; several models are compared with the first, paired by item."""

    out: str | None = None
    """JSON file for the results; scores of single items go to NAME.items.jsonl in the same folder."""
    progress: bool = True
    """Show a progress bar."""


def run(arguments: list[str]) -> None:
    """Parse the arguments after the command's name and carry them out."""
    options = parse("eval", Eval, arguments)
    if options.out is not None and Path(options.out).suffix != ".json":
        raise UserError(f"--out is '{options.out}': expected the name of a .json file")

    from attnres.evals.run import evaluate, refuse_out, show

    if options.out is not None:
        refuse_out(options.out)
    results = evaluate(EvalConfig(**fields_of(options, only=EvalConfig)), progress=options.progress)
    show(results.record)
    if options.out is not None:
        items = results.save(options.out)
        print(f"{options.out}, item by item in {items}")
