"""Text -> token shards: tokenizer, held-out documents, packing. One folder, whole or not there at all."""

import glob
import hashlib
import inspect
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import DownloadColumn
from tokenizers import Tokenizer

from attnres.data.encode import DocumentEncoder, encoded_in_parts, hash_of, spooled
from attnres.data.shards import VERSION, SplitWriter, Tokens, open_tokens, prepared_folder, read_header
from attnres.data.sources import Rows, TextSource, open_source
from attnres.data.tokenizer import (
    bpe_size,
    file_sha256,
    fingerprint,
    load_with_end,
    train_tokenizer,
    vocabulary_size,
)
from attnres.errors import UserError, left_when_stopped
from attnres.files import cache_dir, lock, replaced_folder, user_path, write_json, writing
from attnres.folders import kind_of, refuse_other
from attnres.progress import Bars, say
from attnres.text import memory

MOST_WORKERS = 1024
_BATCH_CHARACTERS = 1 << 20  # text encoded at a time: what bounds the memory
_HASHES = 1 << 64


@dataclass(frozen=True)
class Prepared:
    """A prepared folder: its `path` and its `header`."""

    path: Path
    header: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        """Every id is below it; for a small text less than the vocabulary asked for."""
        return self.header["vocab_size"]

    @property
    def eos_id(self) -> int:
        """The id that closes each document."""
        return self.header["eos_id"]

    def tokens(self, split: str = "train", *, verify: bool | None = None) -> Tokens:
        """Return `open_tokens` of this folder."""
        return open_tokens(self.path, split, verify=verify)


def prepare(
    source: str | Path | Rows = "stdlib",
    tokenizer: str = "bpe:4096",
    *,
    out: str | Path | None = None,
    held_out: float = 0.05,
    limit: int | None = None,
    column: str = "text",
    workers: int = 1,
    progress: bool = True,
) -> Prepared:
    """Tokenise a source once; the same call again returns what is there.

    >>> prepare("my_text/", "bpe:4096").tokens("train")  # doctest: +SKIP

    A document is held out when the hash of its text falls below `held_out`, so a document is on the same side in
    every corpus and copies of it never stand on both; in a corpus so small that none falls below, the one with the
    lowest hash is. Several processes may call this at once: one works, the others wait.

    Args:
        source: as for `open_source`; or a folder that was prepared before, which is returned as it is (settings
            other than the defaults must then be those it was prepared with).
        tokenizer: `bpe:VOCABULARY`, trained on the training documents; or as for `load_tokenizer`.
        out: the folder to make. None: one under `cache_dir()`, named by a hash of the settings and the source.
        held_out: the share of documents for the `val` split, in [0, 1).
        limit: at most this many characters of text.
        column: the JSON field or the column with the text.
        workers: processes that tokenise; the data are the same. With several a call that was cut short leaves what it
            had beside `out`, and the next one goes on from that. What was read of the hub, where a limit is given, is
            left there whatever their number.
        progress: show a bar on stderr, and which files of a folder are read (`Source.files`, also in the header).

    Raises:
        UserError: wrong settings, unreadable text, `out` holding something else, or no room on the disk. What was
            there before is left as it was.
    """
    if not 0 <= held_out < 1:
        raise UserError(f"held_out is {held_out}, expected a share of the documents from 0 up to, not including, 1")
    if not 1 <= workers <= MOST_WORKERS:
        raise UserError(f"workers is {workers}, expected a number of processes from 1 to {MOST_WORKERS}")
    settings = {"tokenizer": tokenizer, "held_out": held_out, "limit": limit, "column": column}
    if isinstance(source, str | Path):
        folder = prepared_folder(str(source))
        if folder is not None and (folder / "tokenizer.json").is_file():
            return _prepared_before(folder, settings, out)
    size = bpe_size(tokenizer)
    text = open_source(source, column=column, limit=limit)
    for line in text.files if progress else ():
        say(Console(stderr=True), line)
    settings = {"source": text.name, **settings}
    known = {**settings, "version": VERSION, "text": text.fingerprint, "tokenizer_files": fingerprint(tokenizer)}
    key = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    target = (cache_dir() / "data" / key[:16] if out is None else user_path(out)).absolute()
    lock_file = target.parent / f".{target.name}.lock"
    if (existing := _existing(target, key)) is not None and not lock_file.exists():
        return existing
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with lock(lock_file, wait=True):
            if _existing(target, key) is None:  # not made by another process in the meantime
                loaded = load_with_end(tokenizer) if size is None else None
                parts = target.with_name(f".{target.name}.{key[:16]}.parts")
                with left_when_stopped(lambda: _left(parts)), replaced_folder(target) as folder:
                    header = _build(folder, text, loaded or size or 0, held_out, progress, workers, parts)
                    about = {"version": VERSION, "key": key, "settings": settings, "source": text.name}
                    files = {"files": text.files} if text.files else {}
                    write_json(folder / "header.json", {**about, **files, **header})
            ours = f".{glob.escape(target.name)}.{'[0-9a-f]' * 16}.parts"
            for left in target.parent.glob(ours):  # of a killed one too
                shutil.rmtree(left, ignore_errors=True)
    return Prepared(target, read_header(target))


def _left(parts: Path) -> str:
    """Return the sentence for a call that was stopped: what stays on the disk, and how to go on."""
    left = f"what was read or tokenised so far stays in {parts}" if parts.exists() else "nothing of it is left"
    return f"stopped while preparing the text, {left}: give the same command again"


def _prepared_before(folder: Path, settings: dict[str, Any], out: str | Path | None) -> Prepared:
    """Return a prepared folder given as the source.

    Raises:
        UserError: it is not sound, or a setting that is not the default is not the one it was prepared with.
    """
    header = read_header(folder)
    if out is not None and user_path(out).absolute() != folder.absolute():
        raise UserError(
            f"{folder} is prepared already, so nothing is written to {out}: leave the folder out, or copy it"
        )
    made_with = header.get("settings")
    made_with = made_with if isinstance(made_with, dict) else {}
    defaults = inspect.signature(prepare).parameters
    for name, value in settings.items():
        if value in (defaults[name].default, made_with.get(name)):
            continue
        if name == "tokenizer" and user_path(value).exists():
            open_tokens(folder, tokenizer=value, verify=False)  # which refuses another than the tokens were made with
            continue
        raise UserError(
            f"{folder} was prepared with {name} {made_with.get(name)!r}, and {value!r} was asked for: "
            f"leave {name} out, or prepare the text again"
        )
    return Prepared(folder, header)


def _existing(target: Path, key: str) -> Prepared | None:
    """Return the prepared data at `target`, None where there is nothing.

    Raises:
        UserError: something else is there.
    """
    if kind_of(refuse_other(target, "prepared data")) is None:
        return None
    header = read_header(target)
    if header.get("key") != key:
        raise UserError(
            f"{target} holds data prepared from another source or with other settings "
            f"({json.dumps(header.get('settings'))}): choose another folder or remove it"
        )
    return Prepared(target, header)


def _build(
    folder: Path,
    source: TextSource,
    tokenizer: tuple[Tokenizer, int] | int,
    held_out: float,
    progress: bool,
    workers: int,
    parts: Path,
) -> dict[str, Any]:
    """Write every file but the header, and return the header.

    Args:
        tokenizer: with its end-of-text id, or the vocabulary of one to be trained.
        parts: where several workers keep theirs, and what was read of a slow source is.
    """
    bars = Bars(DownloadColumn(), rate=lambda rate: f"{memory(rate)}/s", shown=progress)
    with bars:
        bar = bars.add("reading", source.size)
        source = spooled(source, parts, bar.advance)
        threshold = held_below(source, held_out)
        if isinstance(tokenizer, int):
            bar.begin("training the tokenizer")
            kept = (text for text in source.read() if hash_of(text.encode()) >= threshold)
            tokenizer = train_tokenizer(tokenizer, kept)
        model, eos = tokenizer
        bar.begin("tokenising")
        vocab_size = vocabulary_size(model)
        _save_tokenizer(folder, model, eos)
        dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
        encoder = DocumentEncoder(model, eos, threshold)
        writers = {split: SplitWriter(folder, split, dtype) for split in ("train", "val")}
        try:
            if workers > 1:
                encoded = encoded_in_parts(source.read(), encoder, parts, workers)
            else:
                encoded = map(encoder.encode, encoder.batches(source.read(), _BATCH_CHARACTERS))
            for several in encoded:
                for ids, held in zip(several.ids, several.held, strict=True):
                    writers["val" if held else "train"].add(ids)
                bar.advance(several.size)
            splits = {split: writer.close() for split, writer in writers.items()}
            bar.finish()
        finally:
            for writer in writers.values():
                writer.abandon()
    return {
        "dtype": dtype,
        "vocab_size": vocab_size,
        "eos_id": eos,
        "tokenizer_sha256": file_sha256(folder / "tokenizer.json"),
        "splits": splits,
    }


def held_below(source: TextSource, held_out: float) -> int:
    """Return the hash below which documents are held out: such a share of all there are, raised for a corpus so small
    that there would be none.

    Raises:
        UserError: no text, or none left on one of the two sides.
    """
    threshold = int(held_out * _HASHES)
    held: set[int] = set()
    kept: set[int] = set()
    for text in source.read():
        hashed = hash_of(text.encode())
        (held if hashed < threshold else kept).add(hashed)
        if kept and (held or not threshold):
            return threshold
    if not held and not kept:
        raise UserError(f"source '{source.name}' holds no text: every document in it is empty")
    if held and not kept:  # a handful of documents, all below: keep the highest to train on
        if len(held) > 1:
            return max(held)
    elif len(kept) > 1:
        return min(kept) + 1
    raise UserError(
        f"source '{source.name}' is one document, or one over and over, so that none can be held "
        "out: give text of several documents"
    )


def _save_tokenizer(folder: Path, tokenizer: Tokenizer, eos: int) -> None:
    """tokenizer.json, without the tokens that a tokenizer may put around a text, for none are in the data; and the
    config that lets `AutoTokenizer.from_pretrained` open the folder."""
    content, end = json.loads(tokenizer.to_str()), tokenizer.id_to_token(eos)
    bare = _without_special(content["post_processor"])
    if bare != content["post_processor"]:
        tokenizer = Tokenizer.from_str(json.dumps(content | {"post_processor": bare}))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end, "unk_token": end}
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _without_special(processor: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a tokenizer's post-processor, as its file has it, without the part that adds special tokens; None if none
    is left."""
    if processor is None or processor["type"] == "ByteLevel":
        return processor
    if processor["type"] != "Sequence":
        return None
    parts = [part for part in map(_without_special, processor["processors"]) if part is not None]
    return processor | {"processors": parts} if parts else None
