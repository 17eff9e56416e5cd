"""One file of text -> its documents, each a string, read in bounded memory.

.txt      one document; or, where it is a collection, pieces cut at blank lines (`pieces`)
.py       one document, decoded as its own coding line says
.jsonl    one object a line, the document in one field
.json     a list of such objects, or the same as .jsonl
.csv      a header, then one row a document, in one column
.parquet  one row a document, in one column
.arrow    the same, of Arrow's stream or its file, as the library datasets saves it

A .txt, .jsonl, .json or .csv may be compressed: .jsonl.gz, .jsonl.zst.
"""

import csv
import io
import json
import sys
import tokenize
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnres.errors import UserError, first_line
from attnres.paths import refuse_special
from attnres.reading import MAX_BYTES, parse_json

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".parquet", ".arrow", ".py")
PACKED = {".gz": "gzip", ".zst": "zstd"}
"""How a text file is compressed, by its last suffix."""
_TEXTUAL = (".txt", ".jsonl", ".json", ".csv")
_UNPACKED = 4
"""How much longer a text is than its compressed file, about."""
PIECE_CHARACTERS = 16 * 1024  # what a piece of a plain text file aims at
COLLECTION_BYTES = 8 * 1024 * 1024  # a text file larger than this is not one document
_ROWS = 16  # rows of a table decoded at once: documents may be whole books
_ARROW_FILE = b"ARROW1"  # a file of Arrow's begins with it, a stream does not


def read_documents(path: Path, column: str, *, alone: bool) -> Iterator[str]:
    """The documents of one file in its own order, empty ones among them.

    Args:
        path: a file whose `suffix_of` is one of `SUFFIXES`.
        column: the JSON field or the column that holds the text.
        alone: the file is all there is, so that a plain text must be cut for a part of it to be held out.

    Raises:
        UserError: missing, unreadable, not UTF-8, truncated, or without that column.
    """
    refuse_special(path)
    rows = {".parquet": _parquet, ".arrow": _arrow, ".csv": _csv, ".json": _json, ".jsonl": _jsonl}
    suffix = suffix_of(path)
    try:
        if suffix in rows:
            documents = rows[suffix](path, column)
        elif suffix == ".py":
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
        if error.errno is None:  # pyarrow's own
            raise UserError(
                f"{path} is not whole, or not compressed as its name says ({first_line(error)}): write or fetch it "
                "again"
            ) from error
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def suffix_of(path: Path) -> str:
    """The suffix that says how a file is read: that before the one of a compression.

    >>> suffix_of(Path("a.jsonl.zst")), suffix_of(Path("a.parquet.gz")), suffix_of(Path("a.txt"))
    ('.jsonl', '.gz', '.txt')
    """
    inner = Path(path.stem).suffix
    return inner if path.suffix in PACKED and inner in _TEXTUAL else path.suffix


@contextmanager
def _opened(path: Path) -> Generator[io.TextIOBase]:
    """A UTF-8 file, decompressed where its name says that it is compressed; line ends stay as they are."""
    if path.suffix not in PACKED:
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield file
        return
    import pyarrow as pa

    with pa.input_stream(str(path), compression=PACKED[path.suffix]) as raw:
        yield io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")


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
    size = path.stat().st_size
    return size * _UNPACKED if path.suffix in PACKED else size


def pieces(path: Path) -> Iterator[str]:
    """A plain text file cut at blank lines into pieces of about `PIECE_CHARACTERS` characters, fewer for a small file.

    Joined, the pieces are the file. Text without blank lines is cut at line ends, lines without end anywhere.
    """
    target = min(PIECE_CHARACTERS, max(256, path.stat().st_size // 64))
    with _opened(path) as file:
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
    with _opened(path) as file:
        yield file.read()


def _python(path: Path) -> Iterator[str]:
    try:
        with tokenize.open(path) as file:
            yield file.read()
    except (SyntaxError, LookupError, UnicodeError) as error:  # coding lines can name what is no coding of text
        raise UserError(f"{path} is not Python source ({first_line(error)}): remove it or save it as UTF-8") from error


def _json(path: Path, column: str) -> Iterator[str]:
    with _opened(path) as file:
        start = file.read(1)
        while start.isspace():
            start = file.read(1)
        if start == "[":
            text = start + file.read(MAX_BYTES)
            if len(text) > MAX_BYTES:
                raise UserError(
                    f"{path} is a list of more than {MAX_BYTES:,} characters: write one object a line (.jsonl)"
                )
            rows = parse_json(text, str(path), ours=False)
            for number, row in enumerate(rows, 1):
                yield from field_of(row, f"{path} entry {number}", column)
            return
    yield from _jsonl(path, column)


def _jsonl(path: Path, column: str) -> Iterator[str]:
    with _opened(path) as file:
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
            yield from field_of(row, f"{path} line {number}", column)


def field_of(row: Any, where: str, column: str) -> Iterator[str]:
    """The text in one field of a row, or nothing where it is null. Raises UserError where there is no such field."""
    if not isinstance(row, dict):
        raise UserError(f"{where} holds {type(row).__name__}, expected an object with '{column}'")
    text = row.get(column)
    if column not in row or not isinstance(text, str | None):
        raise wrong_column(where, column, [k for k, v in row.items() if isinstance(v, str)])
    if text is not None:
        yield text


def _csv(path: Path, column: str) -> Iterator[str]:
    csv.field_size_limit(sys.maxsize)  # a field may be a book
    with _opened(path) as file:
        rows = csv.reader(file, strict=True)
        try:
            header = next(rows, [])
            if header and column not in header:
                raise wrong_column(str(path), column, header)
            for row in rows:
                if row and len(row) != len(header):
                    raise UserError(
                        f"{path} line {rows.line_num} has {len(row)} fields and its header {len(header)}: is it whole, "
                        "with commas and quotes in the usual places?"
                    )
                if row:
                    yield row[header.index(column)]
        except csv.Error as error:
            raise UserError(
                f"{path} is truncated or no CSV: line {rows.line_num} ({first_line(error)}): write or fetch it again"
            ) from error


def _textual(path: Path, column: str, schema: "pa.Schema") -> None:
    """Raise UserError where a table has no column of that name with text."""
    import pyarrow as pa

    textual = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
    if column not in textual:
        raise wrong_column(str(path), column, textual)


def _arrow(path: Path, column: str) -> Iterator[str]:
    import pyarrow as pa

    def texts(reader: Any, batches: Iterable["pa.RecordBatch"]) -> Iterator[str]:
        _textual(path, column, reader.schema)
        for batch in batches:
            place = batch.schema.get_field_index(column)
            for start in range(0, batch.num_rows, _ROWS):
                rows = batch.column(place).slice(start, _ROWS).to_pylist()
                yield from (text for text in rows if text is not None)

    with _complete(path, "Arrow"), pa.memory_map(str(path)) as file:
        if file.read(len(_ARROW_FILE)) == _ARROW_FILE:
            with pa.ipc.open_file(file) as reader:
                yield from texts(reader, map(reader.get_batch, range(reader.num_record_batches)))
        else:
            file.seek(0)
            with pa.ipc.open_stream(file) as reader:
                yield from texts(reader, reader)


def _parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow.parquet as pq

    with _complete(path, "Parquet"), pq.ParquetFile(path) as file:
        _textual(path, column, file.schema_arrow)
        for batch in file.iter_batches(batch_size=_ROWS, columns=[column]):
            yield from (text for text in batch.column(0).to_pylist() if text is not None)


@contextmanager
def _complete(path: Path, kind: str) -> Generator[None]:
    """Raise a UserError where Arrow cannot read what is in a file; what the system says of it stays an OSError."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(
            f"{path} is not a complete {kind} file ({first_line(error)}): write or fetch it again"
        ) from error


def wrong_column(where: str, column: str, textual: list[str]) -> UserError:
    """The error for a column or field that is not there, or holds no text."""
    have = f"the ones with text are {', '.join(textual)}" if textual else "none has text"
    return UserError(f"{where} has no text column '{column}': {have}; choose one with --column NAME")
