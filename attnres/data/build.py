"""Text -> token shards: tokenizer, held-out documents, packing. The folder appears only when it is complete."""

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

from attnres.data.encode import DocumentEncoder, hash_of, spooled
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

_BATCH_CHARACTERS = 1 << 20  # text encoded at a time, which bounds the memory
_HASHES = 1 << 64


@dataclass(frozen=True)
class Prepared:
    """A prepared folder: its `path` and its `header`."""

    path: Path
    header: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        """Return the vocabulary size, above every id; a small text may give fewer ids than asked for."""
        return self.header["vocab_size"]

    @property
    def eos_id(self) -> int:
        """Return the id that ends each document."""
        return self.header["eos_id"]

    def tokens(self, split: str = "train", *, verify: bool | None = None) -> Tokens:
        """Open a split of this folder; see `open_tokens`."""
        return open_tokens(self.path, split, verify=verify)


def prepare(
    source: str | Path | Rows = "stdlib",
    tokenizer: str = "bpe:4096",
    *,
    out: str | Path | None = None,
    held_out: float = 0.05,
    limit: int | None = None,
    column: str = "text",
    progress: bool = True,
) -> Prepared:
    """Tokenise a source, or return the result of an earlier call with the same arguments.

    >>> prepare("my_text/", "bpe:4096").tokens("train")  # doctest: +SKIP

    A document is held out if the hash of its text, as a fraction, is below `held_out`. So a document is in the same
    split in every corpus, and its copies are never in both. If no hash is below, the document with the lowest one is
    held out. Several processes may call this at once: one works, the others wait. Text downloaded from the hub under a
    `limit` is stored beside `out`, so that the next call continues an interrupted one.

    Args:
        source: as for `open_source`; or a prepared folder, which is returned unchanged (settings other than the
            defaults must then be those it was prepared with).
        tokenizer: `bpe:VOCABULARY`, trained on the training documents; or as for `load_tokenizer`.
        out: the folder to write. None: one under `cache_dir()`, named by a hash of the settings and the source.
        held_out: fraction of the documents for the `val` split, in [0, 1).
        limit: at most this many characters of text.
        column: the JSON field or the column with the text.
        progress: show a bar on stderr, and which files of a folder are read (`TextSource.files`, also in the header).

    Raises:
        UserError: wrong settings, unreadable text, `out` holding something else, or a full disk. `out` is then
            unchanged.
    """
    if not 0 <= held_out < 1:
        raise UserError(f"held_out is {held_out}, expected a fraction of the documents, at least 0 and below 1")
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
    identity = {**settings, "version": VERSION, "text": text.fingerprint, "tokenizer_files": fingerprint(tokenizer)}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    target = (cache_dir() / "data" / key[:16] if out is None else user_path(out)).absolute()
    lock_file = target.parent / f".{target.name}.lock"
    if (existing := _existing(target, key)) is not None and not lock_file.exists():
        return existing
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with lock(lock_file, wait=True):
            if _existing(target, key) is None:  # another process may have made it in the meantime
                loaded = load_with_end(tokenizer) if size is None else None
                spool = target.with_name(f".{target.name}.{key[:16]}.parts")
                with left_when_stopped(lambda: _left(spool)), replaced_folder(target) as folder:
                    header = _build(folder, text, loaded or size or 0, held_out, progress, spool)
                    about = {"version": VERSION, "key": key, "settings": settings, "source": text.name}
                    files = {"files": text.files} if text.files else {}
                    write_json(folder / "header.json", {**about, **files, **header})
            pattern = f".{glob.escape(target.name)}.{'[0-9a-f]' * 16}.parts"
            for left in target.parent.glob(pattern):  # also those of a killed process
                shutil.rmtree(left, ignore_errors=True)
    return Prepared(target, read_header(target))


def _left(spool: Path) -> str:
    """Return the sentence for an interrupted call: what stays on the disk, and how to continue."""
    left = f"what was read so far stays in {spool}" if spool.exists() else "nothing of it is left"
    return f"stopped while preparing the text, {left}: give the same command again"


def _prepared_before(folder: Path, settings: dict[str, Any], out: str | Path | None) -> Prepared:
    """Return a prepared folder that was given as the source.

    Raises:
        UserError: the folder is damaged, or a setting differs from both the default and the one it was prepared with.
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
            # refuses a tokenizer other than the one that made the tokens
            open_tokens(folder, tokenizer=value, verify=False)
            continue
        raise UserError(
            f"{folder} was prepared with {name} {made_with.get(name)!r}, and {value!r} was asked for: "
            f"leave {name} out, or prepare the text again"
        )
    return Prepared(folder, header)


def _existing(target: Path, key: str) -> Prepared | None:
    """Return the prepared data at `target`, None if nothing is there.

    Raises:
        UserError: `target` holds something else.
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
    spool: Path,
) -> dict[str, Any]:
    """Write every file except the header, and return the header.

    Args:
        tokenizer: a tokenizer with its end-of-text id, or the vocabulary size of one to be trained.
        spool: folder for the text of a slow source.
    """
    bars = Bars(DownloadColumn(), rate=lambda rate: f"{memory(rate)}/s", shown=progress)
    with bars:
        bar = bars.add("reading", source.size)
        source = spooled(source, spool, bar.advance)
        threshold = held_below(source, held_out)
        if isinstance(tokenizer, int):
            bar.begin("training the tokenizer")
            training_texts = (text for text in source.read() if hash_of(text.encode()) >= threshold)
            tokenizer = train_tokenizer(tokenizer, training_texts)
        model, eos = tokenizer
        bar.begin("tokenising")
        vocab_size = vocabulary_size(model)
        _save_tokenizer(folder, model, eos)
        dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
        encoder = DocumentEncoder(model, eos, threshold)
        writers = {split: SplitWriter(folder, split, dtype) for split in ("train", "val")}
        try:
            for texts in encoder.batches(source.read(), _BATCH_CHARACTERS):
                for ids, held in encoder.encode(texts):
                    writers["val" if held else "train"].add(ids)
                bar.advance(sum(len(text.encode()) for text in texts))
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
    """Return the threshold of the hash below which documents are held out: the fraction `held_out` of all hashes,
    raised for a corpus so small that no document would be held out.

    Raises:
        UserError: no text, or one of the two splits would be empty.
    """
    threshold = int(held_out * _HASHES)
    validation: set[int] = set()
    training: set[int] = set()
    for text in source.read():
        hashed = hash_of(text.encode())
        (validation if hashed < threshold else training).add(hashed)
        if training and (validation or not threshold):
            return threshold
    if not validation and not training:
        raise UserError(f"source '{source.name}' holds no text: every document in it is empty")
    if validation and not training:  # a handful of documents, all below: train on the one with the highest hash
        if len(validation) > 1:
            return max(validation)
    elif len(training) > 1:
        return min(training) + 1
    raise UserError(
        f"source '{source.name}' is one document, or one over and over, so that none can be held "
        "out: give text of several documents"
    )


def _save_tokenizer(folder: Path, tokenizer: Tokenizer, eos: int) -> None:
    """Write tokenizer.json without the special tokens that the tokenizer may put around a text, because the data hold
    none; and a tokenizer_config.json with which `AutoTokenizer.from_pretrained` opens the folder."""
    content, end = json.loads(tokenizer.to_str()), tokenizer.id_to_token(eos)
    bare = _without_special(content["post_processor"])
    if bare != content["post_processor"]:
        tokenizer = Tokenizer.from_str(json.dumps(content | {"post_processor": bare}))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end, "unk_token": end}
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _without_special(processor: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a tokenizer's post-processor (as in its file) without the part that adds special tokens; None if nothing
    is left."""
    if processor is None or processor["type"] == "ByteLevel":
        return processor
    if processor["type"] != "Sequence":
        return None
    parts = [part for part in map(_without_special, processor["processors"]) if part is not None]
    return processor | {"processors": parts} if parts else None
