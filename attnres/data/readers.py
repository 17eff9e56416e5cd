"""Read the documents of one file, each a string, in bounded memory.

.txt      and other plain text (`PROSE`, `CODE`): one document; or, where it is a collection or all there is, pieces cut
          at blank lines (`pieces`). Python is decoded as its own coding line says
.jsonl    one object a line, the document in one field
.json     a list of such objects, one of them over several lines, or the same as .jsonl
.csv      a header, then one row a document, in one column
.parquet  one row a document, in one column
.arrow    the same, of Arrow's stream or its file, as the library datasets saves it

Prose, .jsonl, .json and .csv may be compressed: .jsonl.gz, .jsonl.zst. The case of a suffix does not matter.
"""

import csv
import io
import json
import sys
import tokenize
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnres.errors import UserError, first_line
from attnres.files import refuse_special
from attnres.reading import MAX_BYTES, parse_json, refuse_no_text

if TYPE_CHECKING:
    import pyarrow as pa

PROSE = (".txt", ".md", ".rst", ".tex", ".raw")
CODE = tuple(".py .c .h .cc .cpp .hpp .cu .java .js .ts .go .rs .jl .r .rb .sh .hs .lua .scala .swift .kt".split())
_ROWS_OF = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
SUFFIXES = (*PROSE, *CODE, *_ROWS_OF)
PACKED = {".gz": "gzip", ".zst": "zstd"}
"""How a text file is compressed, by its last suffix."""
KINDS = f"text ({', '.join(PROSE)}), code (.py, .c, ...) or rows ({', '.join(_ROWS_OF)}), also with .gz or .zst"
"""The kinds of files that are read, as part of a sentence."""
_TEXTUAL = (*PROSE, ".jsonl", ".json", ".csv")
_UNPACKED = 4
"""Approximate length of a text relative to its compressed file."""
PIECE_CHARACTERS = 16 * 1024  # target length of a piece of a plain-text file
COLLECTION_BYTES = 8 * 1024 * 1024  # a text file larger than this is split into pieces
_ROWS = 16  # rows decoded at once: a document may be a whole book
_ARROW_FILE = b"ARROW1"  # first bytes of an Arrow file; an Arrow stream lacks them


def read_documents(path: Path, column: str, *, alone: bool) -> Iterator[str]:
    """Yield the documents of one file in its own order, empty ones among them.

    Args:
        path: a file whose `suffix_of` is one of `SUFFIXES`.
        column: the JSON field or the column that holds the text.
        alone: the file is the whole source, so that a plain text is cut into pieces, some of which can be held out.

    Raises:
        UserError: missing, unreadable, not UTF-8, truncated, or without that column.
    """
    refuse_special(path)
    rows = {".parquet": _parquet, ".arrow": _arrow, ".csv": _csv, ".json": _json, ".jsonl": _jsonl}
    suffix = suffix_of(path)
    try:
        if suffix in rows:
            documents = rows[suffix](path, column)
        elif alone or path.stat().st_size > COLLECTION_BYTES:
            documents = pieces(path)
        else:
            documents = _text(path)
        yield from documents
    except UnicodeError as error:
        reason = error.reason if isinstance(error, UnicodeDecodeError) else first_line(error)
        raise UserError(
            f"{path} is not UTF-8 text ({reason}): convert it first, for example with iconv -f LATIN1 -t UTF-8"
        ) from error
    except OSError as error:
        if error.errno is None:  # an error of pyarrow, not of the system
            raise UserError(
                f"{path} is not whole, or not compressed as its name says ({first_line(error)}): write or fetch it "
                "again"
            ) from error
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def suffix_of(path: Path) -> str:
    """Return the suffix that decides how a file is read: the one before a compression suffix.

    >>> suffix_of(Path("a.jsonl.zst")), suffix_of(Path("a.parquet.gz")), suffix_of(Path("a.txt"))
    ('.jsonl', '.gz', '.txt')
    """
    suffix, inner = path.suffix.lower(), Path(path.stem).suffix.lower()
    return inner if suffix in PACKED and inner in _TEXTUAL else suffix


@contextmanager
def opened(path: Path) -> Generator[io.TextIOBase]:
    """Open a text file, decompressed if its suffix says so. Line ends are unchanged, except in Python source.

    Raises:
        UserError: the first bytes are those of UTF-16 or of a binary file.
    """
    compression = PACKED.get(path.suffix.lower())
    if compression is None:
        raw = open(path, "rb")  # noqa: SIM115 (closed with the text below)
    else:
        import pyarrow as pa

        raw = io.BufferedReader(pa.input_stream(str(path), compression=compression))
    with raw:
        refuse_no_text(path, raw.peek())
        encoding, newline = "utf-8-sig", ""
        try:
            if suffix_of(path) == ".py":
                encoding, newline = tokenize.detect_encoding(raw.readline)[0], None
                raw.seek(0)
            file = io.TextIOWrapper(raw, encoding=encoding, newline=newline)
        except (SyntaxError, LookupError) as error:  # a coding line may name a codec that is not for text
            raise UserError(
                f"{path} is not Python source ({first_line(error)}): remove it or save it as UTF-8"
            ) from error
        yield file


def text_bytes(path: Path, column: str) -> int:
    """Estimate the bytes of text in a file without reading it; for progress bars only."""
    if suffix_of(path) == ".parquet":
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
            pass  # reading the file raises the error
    size = path.stat().st_size
    return size * _UNPACKED if path.suffix.lower() in PACKED else size


def pieces(path: Path) -> Iterator[str]:
    """Yield a plain text file cut at blank lines into pieces of about `PIECE_CHARACTERS` characters, shorter for a
    small file.

    Joined, the pieces are the file. Text without blank lines is cut at line ends, and very long lines anywhere.
    """
    target = min(PIECE_CHARACTERS, max(256, path.stat().st_size // 64))
    with opened(path) as file:
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
    with opened(path) as file:
        yield file.read()


def _json(path: Path, column: str) -> Iterator[str]:
    with opened(path) as file:
        start = file.read(1)
        while start.isspace():
            start = file.read(1)
        line = file.readline(MAX_BYTES)
        if start == "[" or (start == "{" and line.isspace()):
            text = start + line + file.read(MAX_BYTES)
            if len(text) > MAX_BYTES:
                raise UserError(f"{path} has more than {MAX_BYTES:,} characters: write one object a line (.jsonl)")
            value = parse_json(text, str(path), ours=False)
            for number, row in enumerate(value if isinstance(value, list) else [value], 1):
                yield from field_of(row, f"{path} entry {number}", column)
            return
    yield from _jsonl(path, column)


def _jsonl(path: Path, column: str) -> Iterator[str]:
    with opened(path) as file:
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
    """Yield the text in one field of a row, or nothing if it is null. Raises UserError if the field is missing."""
    if not isinstance(row, dict):
        raise UserError(f"{where} holds {type(row).__name__}, expected an object with '{column}'")
    text = row.get(column)
    if column not in row or not isinstance(text, str | None):
        raise wrong_column(where, column, [k for k, v in row.items() if isinstance(v, str)])
    if text is not None:
        yield text


def _csv(path: Path, column: str) -> Iterator[str]:
    csv.field_size_limit(sys.maxsize)  # a field may hold a whole book
    with opened(path) as file:
        rows = csv.reader(file, strict=True)
        try:
            header = next(rows, [])
            if header and column not in header:
                raise wrong_column(str(path), column, header)
            if header.count(column) > 1:
                raise _twice(path, column)
            for row in rows:
                if row and len(row) != len(header):
                    raise UserError(
                        f"{path} line {rows.line_num} has {len(row)} fields and its header {len(header)}: is it "
                        "complete, with commas and quotes in the usual places?"
                    )
                if row:
                    yield row[header.index(column)]
        except csv.Error as error:
            raise UserError(
                f"{path} is truncated or no CSV: line {rows.line_num} ({first_line(error)}): write or fetch it again"
            ) from error


def _check_column(path: Path, column: str, schema: "pa.Schema") -> None:
    """Raise UserError if a table has no text column of that name, or several."""
    import pyarrow as pa
    from pyarrow import types

    def is_of(kind: "pa.DataType", tests: Iterable[Callable[..., bool]]) -> bool:
        while types.is_dictionary(kind) or types.is_run_end_encoded(kind) or isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind.value_type
        return any(test(kind) for test in tests)

    text = (types.is_string, types.is_large_string, types.is_string_view)
    data = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_null)
    if schema.names.count(column) > 1:
        raise _twice(path, column)
    if column not in schema.names or not is_of(schema.field(column).type, (*text, *data)):
        raise wrong_column(str(path), column, [field.name for field in schema if is_of(field.type, text)])


def _texts_in(batch: "pa.RecordBatch", column: str) -> Iterator[str]:
    """Yield the texts of a column, without nulls; bytes as UTF-8."""
    values = batch.column(batch.schema.get_field_index(column))
    for start in range(0, batch.num_rows, _ROWS):
        for value in values.slice(start, _ROWS).to_pylist():
            if value is not None:
                yield value.decode() if isinstance(value, bytes) else value


def _arrow(path: Path, column: str) -> Iterator[str]:
    import pyarrow as pa

    with _complete(path, "Arrow"), pa.memory_map(str(path)) as file:
        is_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
        file.seek(0)
        with pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file) as reader:
            _check_column(path, column, reader.schema)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            for batch in batches:
                yield from _texts_in(batch, column)


def _parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow.parquet as pq

    with _complete(path, "Parquet"), pq.ParquetFile(path) as file:
        _check_column(path, column, file.schema_arrow)
        for batch in file.iter_batches(batch_size=_ROWS, columns=[column]):
            yield from _texts_in(batch, column)


@contextmanager
def _complete(path: Path, kind: str) -> Generator[None]:
    """Raise a UserError if Arrow cannot read the content of a file; an OSError of the system passes."""
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
    """Return the error for a column or field that is missing or holds no text."""
    have = f"the ones with text are {', '.join(textual)}" if textual else "none has text"
    return UserError(
        f"{where} has no text column '{column}': {have}; choose one with --column NAME, or name the files that have it"
    )


def _twice(path: Path, column: str) -> UserError:
    return UserError(f"{path} has several columns '{column}': rename all but one")
