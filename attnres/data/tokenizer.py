"""Tokenizers: trained here, from a local folder, or from the Hugging Face hub.

Every tokenizer is a `tokenizers.Tokenizer` with an end-of-text token, stored as `tokenizer.json` beside the tokens that
it made.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypedDict

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from attnres.errors import UserError, foreign
from attnres.files import refuse_special, user_path
from attnres.hub import fetch, is_hub_name
from attnres.reading import read_json
from attnres.typed import checked

VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "*.model", "*.tiktoken")
"""Patterns of files; a tokenizer's folder has at least one of them."""
TOKENIZER_FILES = (*VOCABULARIES, "merges.txt", "tokenizer*", "vocab*", "special_tokens_map.json", "added_tokens.json")
"""Patterns of all files that a tokenizer's folder may have."""

END_OF_TEXT = "<|endoftext|>"
SAMPLE_CHARACTERS = 8_000_000  # of training text, trained in seconds
SPARSE, MAX_UNUSED = 4, 100_000
"""Ids per token, and ids in addition, that are accepted: padding rows and reserved tokens are usual."""
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
_PAIRS = {"140f02bb05c0d82c": "gpt2", "0d35466a430dfef1": "qwen2"}
"""Hash of the tokens of a vocab.json, in order -> its family: vocab.json and merges.txt do not say how text is
split."""


class _Token(TypedDict):
    content: str


class _Described(TypedDict, total=False):
    """The fields of tokenizer_config.json that are used here."""

    eos_token: str | _Token | None


def holds_tokenizer(folder: Path) -> bool:
    """Return whether a folder has the files of a tokenizer of any kind."""
    return any(file for pattern in VOCABULARIES for file in folder.glob(pattern))


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Load a tokenizer; see `load_with_end`.

    >>> load_tokenizer("gpt2").encode("Once upon").tokens  # doctest: +SKIP
    ['Once', 'Ġupon']
    """
    return load_with_end(spec)[0]


def load_with_end(spec: str | Path) -> tuple[Tokenizer, int]:
    """Load a tokenizer that neither pads nor truncates, and return it with its end-of-text id.

    The end of text is what `tokenizer_config.json` or the hub calls `eos_token`, otherwise the first of the usual
    names among the special tokens, otherwise `END_OF_TEXT`, added where the vocabulary does not have it.

    Args:
        spec: a folder with `tokenizer.json` (a prepared folder is one), or with other files of a tokenizer and a
            config that says what they are; `vocab.json` and `merges.txt` of GPT-2 or Qwen2 need none. Or a
            `tokenizer.json`; or a name on the hub.

    Raises:
        UserError: nothing there, files that are no tokenizer, or a hub name that cannot be fetched.
    """
    path = user_path(spec)
    if path.is_dir():
        tokenizer, end = _from_folder(path)
    elif path.is_file():
        tokenizer, end = _from_json(path), None
    elif is_hub_name(str(spec)) and path.suffix != ".json":
        tokenizer, end = _from_folder(fetch(str(spec), (*TOKENIZER_FILES, "config.json")))
    else:
        raise UserError(
            f"tokenizer '{spec}' does not exist: give bpe:VOCABULARY, a folder, a tokenizer.json or a hub name"
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if end is None or tokenizer.token_to_id(end) is None:
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        # "</s>" may be an ordinary token of this vocabulary
        end = next((name for name in _ENDS if name in special), END_OF_TEXT)
    tokenizer.add_special_tokens([end])
    return tokenizer, _id(tokenizer, end)


def train_tokenizer(vocab_size: int, documents: Iterable[str]) -> tuple[Tokenizer, int]:
    """Train a byte-level BPE with GPT-2's split on the first `SAMPLE_CHARACTERS` of `documents`; return it with its
    end-of-text id.

    The vocabulary is smaller than asked where the text does not hold as many pairs that occur twice.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(documents), trainer)
    return tokenizer, _id(tokenizer, END_OF_TEXT)


def bpe_size(spec: str) -> int | None:
    """Return the vocabulary that `bpe:VOCABULARY` asks for, or None for another kind of tokenizer.

    >>> bpe_size("bpe:4096"), bpe_size("gpt2")
    (4096, None)
    """
    if not spec.startswith("bpe:"):
        return None
    digits = spec.removeprefix("bpe:")
    if not digits.isdecimal() or not 257 <= int(digits) <= 1_000_000:
        raise UserError(f"tokenizer '{spec}': expected bpe: and a number from 257 (256 bytes, end of text) to 1000000")
    return int(digits)


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the largest id plus one: the rows that a model's embedding needs.

    Raises:
        UserError: the ids are far more than the tokens; each would take a row of the embedding.
    """
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    size = max(ids, default=-1) + 1
    if size > SPARSE * len(ids) + MAX_UNUSED:
        raise UserError(f"the tokenizer has {len(ids):,} tokens and ids up to {size - 1:,}: number them consecutively")
    return size


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a small file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fingerprint(spec: str) -> str:
    """Return a string that changes whenever the tokenizer may have changed: the hash of the local files, otherwise the
    name."""
    path = user_path(spec)
    if path.is_file():
        return file_sha256(path)
    if path.is_dir():
        patterns = (*TOKENIZER_FILES, "config.json")
        files = sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()})
        return " ".join(f"{file.name} {file_sha256(file)}" for file in files)
    return spec


def _id(tokenizer: Tokenizer, token: str) -> int:
    id = tokenizer.token_to_id(token)
    assert id is not None, f"{token} was just added"
    return id


def _sample(documents: Iterable[str]) -> Iterator[str]:
    left = SAMPLE_CHARACTERS
    for text in documents:
        if left <= 0:
            return
        yield text[:left]
        left -= len(text)


def _from_folder(folder: Path) -> tuple[Tokenizer, str | None]:
    end = None
    config = folder / "tokenizer_config.json"
    if config.is_file():
        end = checked(read_json(config, ours=False), _Described, config, "fetch the tokenizer again").get("eos_token")
        end = end if end is None or isinstance(end, str) else end["content"]
    if (folder / "tokenizer.json").is_file():
        return _from_json(folder / "tokenizer.json"), end
    described = config.is_file() or (folder / "config.json").is_file()
    pair = (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
    if not holds_tokenizer(folder) or not (described or pair):
        raise UserError(f"folder {folder} holds no tokenizer: expected tokenizer.json, or vocab.json and merges.txt")
    kind = None if described else _kind_of_pair(folder)
    from transformers import AutoTokenizer

    with foreign(f"the tokenizer in {folder} cannot be opened", "copy it again"):
        loaded = AutoTokenizer.from_pretrained(folder, tokenizer_type=kind)
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise UserError(f"the tokenizer in {folder} has no fast version (tokenizer.json): choose one that has")
    return backend, getattr(loaded, "eos_token", None)


def _kind_of_pair(folder: Path) -> str:
    """Return the family of the vocab.json and merges.txt in a folder without a config. Raises UserError."""
    vocabulary = read_json(folder / "vocab.json", ours=False)
    numbered = isinstance(vocabulary, dict) and all(type(number) is int for number in vocabulary.values())
    ids = sorted(vocabulary.items(), key=lambda pair: pair[1]) if numbered else []
    key = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
    if key not in _PAIRS:
        raise UserError(
            f"vocab.json and merges.txt in {folder} do not say how text is split, and are neither GPT-2's nor Qwen2's: "
            "copy the model's tokenizer.json there, or its tokenizer_config.json"
        )
    return _PAIRS[key]


def _from_json(path: Path) -> Tokenizer:
    refuse_special(path)
    with foreign(f"{path} is not a tokenizer", "give a tokenizer.json, or a folder with one"):
        return Tokenizer.from_file(str(path))
