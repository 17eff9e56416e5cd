"""`attnres prepare`: tokenise a corpus."""

from dataclasses import dataclass

from attnres.flags import parse


@dataclass
class Prepare:
    """Tokenise a corpus into shards. Training does this by itself; use it to prepare data ahead or in a folder of
    yours."""

    source: str = "stdlib"
    """stdlib (Python's own sources), a file or folder (.txt, .md, .jsonl, .json, .csv, .parquet, .arrow, .py and other
    code; text also as .gz or .zst; what datasets.save_to_disk wrote), a pattern ('data/**/*.txt'),
    hub:NAME[:CONFIG[:SPLIT]], task:NAME, or several: mix:SOURCE,SOURCE is all of each, mix:SOURCE=3,SOURCE=1 mixes
    them by these weights until one is used up. Of a folder the split train is read; a line says what is left out."""
    tokenizer: str = "bpe:4096"
    """bpe:VOCAB trains a byte-level BPE on the training text; else a local tokenizer folder or a hub name."""
    column: str = "text"
    """Field or column that holds the text, of rows."""
    held_out: float = 0.05
    """Fraction of the documents held out for validation."""
    limit: int | None = None
    """Read at most this many characters of the source; none reads all."""
    out: str | None = None
    """Folder for the shards; none is one in the cache."""
    workers: int = 1
    """Processes that tokenise; the data do not depend on their number. With several, an interrupted command continues
    when it is given again. What was read of the hub under a limit is not read again."""


def run(arguments: list[str]) -> None:
    """Parse the arguments after the command's name and carry them out."""
    options = parse("prepare", Prepare, arguments)

    from attnres.data import prepare

    prepared = prepare(
        options.source,
        options.tokenizer,
        out=options.out,
        held_out=options.held_out,
        limit=options.limit,
        column=options.column,
        workers=options.workers,
    )
    for name, split in prepared.header["splits"].items():
        print(f"{name}: {split['tokens']:,} tokens in {split['documents']:,} documents")
    print(f"{prepared.path} (vocabulary {prepared.vocab_size:,})")
