"""One file of text -> its documents, each a string, read in bounded memory.

.txt      one document; or, where it is a collection, pieces cut at blank lines (`pieces`)
.py       one document, decoded as its own coding line says
.jsonl    one object a line, the document in one field
.parquet  one row a document, in one column
"""

import json
import tokenize
from collections.abc import Iterator
from pathlib import Path

from attnres.errors import UserError, first_line
from attnres.paths import refuse_special
from attnres.reading import parse_json

SUFFIXES = (".txt", ".jsonl", ".parquet", ".py")
PIECE_BYTES = 16 * 1024  # what a piece of a plain text file aims at
COLLECTION_BYTES = 8 * 1024 * 1024  # a text file larger than this is not one document
_ROWS = 16  # Parquet rows decoded at once: documents may be whole books


def read_documents(path: Path, column: str, *, alone: bool) -> Iterator[str]:
    """The documents of one file in its own order, without the ones that hold nothing but white space.

    Args:
        path: a file with one of `SUFFIXES`.
        column: the JSON field or Parquet column that holds the text.
        alone: the file is all there is, so that a plain text must be cut for a part of it to be held out.

    Raises:
        UserError: missing, unreadable, not UTF-8, truncated, or without that column.
    """
    refuse_special(path)
    try:
        if path.suffix == ".parquet":
            documents = _parquet(path, column)
        elif path.suffix == ".jsonl":
            documents = _jsonl(path, column)
        elif path.suffix == ".py":
            documents = _python(path)
        elif alone or path.stat().st_size > COLLECTION_BYTES:
            documents = pieces(path)
        else:
            documents = _text(path)
        yield from documents
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text ({error.reason}): convert it first, for example with iconv -t UTF-8"
        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def text_bytes(path: Path, column: str) -> int:
    """About how many bytes of text the file holds, without reading it; for progress only."""
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(path) as file:
                meta = file.metadata
                chunks = [
                    meta.row_group(g).column(c) for g in range(meta.num_row_groups) for c in range(meta.num_columns)
                ]
                return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)
        except (pa.ArrowException, OSError):
            pass  # reading it says what is wrong
    return path.stat().st_size


def pieces(path: Path) -> Iterator[str]:
    """A plain text file cut at blank lines into pieces of about `PIECE_BYTES`, fewer for a small file.

    Joined, the pieces are the file. Text without blank lines is cut at line ends, lines without end anywhere.
    """
    target = min(PIECE_BYTES, max(256, path.stat().st_size // 64))
    with open(path, encoding="utf-8-sig", newline="") as file:
        lines: list[str] = []
        size = 0
        while line := file.readline(target):
            lines.append(line)
            size += len(line)
            if (size >= target and line.isspace()) or size >= 4 * target:
                yield "".join(lines)
                lines, size = [], 0
        yield "".join(lines)


def _text(path: Path) -> Iterator[str]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        yield file.read()


def _python(path: Path) -> Iterator[str]:
    try:
        with tokenize.open(path) as file:
            yield file.read()
    except (SyntaxError, LookupError, UnicodeError) as error:  # coding lines can name what is no coding of text
        raise UserError(f"{path} is not Python source ({first_line(error)}): remove it or save it as UTF-8") from error


def _jsonl(path: Path, column: str) -> Iterator[str]:
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                row = parse_json(line, f"{path} line {number}", ours=False)
            except UserError as error:
                if line.endswith("\n") or not isinstance(error.__cause__, json.JSONDecodeError):
                    raise
                raise UserError(
                    f"{path} is truncated or not JSON Lines: line {number}, its last, is not whole "
                    f"({first_line(error.__cause__)}): write or fetch it again"
                ) from error
            if not isinstance(row, dict):
                raise UserError(f"{path} line {number} holds {type(row).__name__}, expected an object with '{column}'")
            text = row.get(column)
            if not isinstance(text, str):
                raise wrong_column(f"{path} line {number}", column, [k for k, v in row.items() if isinstance(v, str)])
            yield text


def _parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            textual = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
            if column not in textual:
                raise wrong_column(str(path), column, textual)
            for batch in file.iter_batches(batch_size=_ROWS, columns=[column]):
                for text in batch.column(0).to_pylist():
                    if text is not None:
                        yield text
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(
            f"{path} is not a complete Parquet file ({first_line(error)}): write or fetch it again"
        ) from error


def wrong_column(where: str, column: str, textual: list[str]) -> UserError:
    """The error for a column or field that is not there, or holds no text."""
    have = f"the ones with text are {', '.join(textual)}" if textual else "none has text"
    return UserError(f"{where} has no text column '{column}': {have}; choose one with --column NAME")
