"""The tokens of a text or corpus at which an edge is largest: what the command `attnres search` does."""

from rich.console import Console

from attnres.analysis.ablations import source_and_read
from attnres.analysis.config import SearchConfig
from attnres.analysis.texts import batch_size_of, context_of, open_residual, text_of
from attnres.device import pick_device
from attnres.errors import UserError
from attnres.files import write_json
from attnres.folders import refuse_other_file
from attnres.inspect.corpus import Search, find_edge, search
from attnres.inspect.pieces import spelled
from attnres.progress import counting
from attnres.terminal import grid, say, wide
from attnres.text import counted, short

SHOWN = 30
"""Characters of the text on either side of a token."""


def find_tokens(config: SearchConfig, console: Console | None = None) -> Search:
    """Search and print what is found.

    Raises:
        UserError: no model with a residual of this package, no such edge, no text, options that do not fit, or `out`
            is the place of something else.
    """
    console = wide(console)
    out = None if config.out is None else refuse_other_file(config.out, {"model", "text", "read", "hits"})
    checkpoint, _ = open_residual(config, config.model)
    text = text_of(config, checkpoint.run)
    context = context_of(config, checkpoint)
    source, read = source_and_read(config.edge)
    if read is None:
        raise UserError(f"'{config.edge}' names a source and no read: expected SOURCE@READ, such as embedding@mlp3")
    batch_size = batch_size_of(config.batch_tokens, checkpoint, context)
    model = checkpoint.load(config.dtype, str(pick_device(config.device)))
    find_edge(model, source, read)  # says what is wrong before the text is read
    with counting("searching", config.limit, "tokens", shown=config.progress) as on_tokens:
        result = search(
            model,
            checkpoint.tokenizer,
            text.read(),
            source,
            read,
            context=context,
            by=config.by,
            least=config.least,
            top=config.top,
            limit=config.limit,
            batch_size=batch_size,
            on_tokens=on_tokens,
        )
    say(
        console,
        f"{checkpoint.title()}: where {result.source} is {'least' if result.least else 'most'} of the read of "
        f"{result.read}, by {result.by}; {text.name}, {counted(result.tokens, 'token')} of "
        f"{counted(result.documents, 'document')}, mean {short(result.mean)}",
    )
    table = grid(right=("contribution", "weight", "document", "token", "before"))
    for title in ("it", "after"):
        table.add_column(title)
    for hit in result.hits:
        before, after = spelled(hit.before)[-SHOWN:], spelled(hit.after)[:SHOWN]
        numbers = (short(hit.contribution), short(hit.weight), str(hit.document), str(hit.position))
        table.add_row(*numbers, before, f"[{spelled(hit.token)}]", after)
    console.print(table)
    if out is not None:
        write_json(out, {"format": 1, "model": checkpoint.title(), "text": text.name} | result.to_dict())
        say(console, f"wrote {config.out}")
    return result
