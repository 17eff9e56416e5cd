"""The models that are open and the steps of their training: their files, names, keys and tokenizers."""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from attnres.app.cache import Cache
from attnres.app.measured import Measured, Reading
from attnres.app.state import MAX_CHARACTERS, Cut, key_of
from attnres.errors import UserError
from attnres.inspect.edits import source_names
from attnres.inspect.geometry import query_cosine
from attnres.inspect.recording import find_residual
from attnres.inspect.subject import TextModel, as_model, as_tokenizer, prompt_ids, tokenizer_of, vocab_size
from attnres.models.convert import convert
from attnres.models.encoding import check_length, encode_prompt, piece, stated_context
from attnres.models.model_files import EXAMPLE, residual_at, snapshots
from attnres.models.open import Checkpoint, open_checkpoint
from attnres.ops.devices import pick_device
from attnres.residuals import Read, Residual

MAX_TOKENS = 512
"""Tokens of a text: what a page draws and a processor computes while one waits."""
SAMPLE = 4096
"""Numbers of each tensor by which models in memory are told apart."""


@dataclass(frozen=True)
class Encoder:
    """A model's tokenizer.

    Attributes:
        name: the model's, for messages.
        context: tokens that a text may have.
        rows: of the model's embedding; None where its config does not say.
    """

    tokenizer: Any
    name: str
    context: int
    rows: int | None

    def encode(self, text: str) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Return ids of a text's tokens, and where in it each lies (nothing for a tokenizer that does not say).

        Raises:
            UserError: no text, too long a text, or as `encode_prompt`.
        """
        if not text.strip():
            raise UserError("there is no text: type some, or take an example")
        if len(text) > MAX_CHARACTERS:
            raise UserError(f"the text has {len(text):,} characters and this page takes {MAX_CHARACTERS:,}: shorten it")
        ids, offsets = encode_prompt(self.tokenizer, text, rows=self.rows, context=None, name=self.name)
        check_length(len(ids), self.context, f"{self.name} on this page")
        return tuple(ids), offsets

    def beginning(self, text: str) -> str:
        """Return the beginning of a text that fits into the context, up to the end of a line or a word where there is
        one. A text that the tokenizer cannot encode is returned whole: `encode` raises its error."""
        try:
            spans = encode_prompt(self.tokenizer, text, rows=None, context=None)[1]
        except UserError:
            return text
        if len(spans) <= self.context:
            return text
        cut = text[: spans[self.context - 1][1]]
        return next((cut[:place] for mark in "\n " if (place := cut.rfind(mark)) > 0), cut)

    def token_at(self, text: str, character: int) -> int | None:
        """Return the number of the token of a text in which a character lies; None where the tokenizer does not say."""
        spans = self.encode(text)[1]
        return next((i for i, (start, end) in enumerate(spans) if start <= character < end), None)

    def end_of(self, text: str, token: int) -> int | None:
        """Return the last character of a token of a text; None where the tokenizer does not say, or the token has
        none."""
        start, end = next(iter(self.encode(text)[1][token : token + 1]), (0, 0))
        return end - 1 if end > start else None

    def notes(self, text: str, ids: Sequence[int]) -> list[str]:
        """Return warnings about a text's tokens: characters that the tokenizer has never seen, a single token."""
        notes = []
        decoded = self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        lost = sorted({character for character in text if not character.isspace()} - set(decoded))
        if self.tokenizer.unk_token_id in ids or (lost and not set(text.lower()) <= set(decoded.lower())):
            some = " ".join(lost[:5])
            listing = f" ({some}{' ...' if len(lost) > 5 else ''})" if lost else ""
            notes.append(f"The tokenizer of {self.name} has never seen some characters of this text{listing}.")
        if len(ids) == 1:
            notes.append("One token: it has a next-token distribution, but no loss.")
        return notes


class Opened(Measured):
    """A model to look into, with its tokenizer; its weights are read when they are first needed.

    Args:
        name: a run folder, a checkpoint folder in one, a model folder or a name on the hub.
        trust_remote_code: run code that comes with the model.

    Attributes:
        whole: for a step of a run, the run's final model; for any other model itself.
        opening_text: the text that a page opens with; None takes the example of `kind_of_text`, "code" or "prose".

    Raises:
        UserError: no model there.
    """

    opening_text: str | None = None
    kind_of_text = "code"

    def __init__(self, name: str | Path, *, trust_remote_code: bool = False) -> None:
        checkpoint = open_checkpoint(name, trust_remote_code=trust_remote_code)
        self._share(checkpoint, min(checkpoint.context, MAX_TOKENS))
        self.name, self.step = checkpoint.title(), checkpoint.step
        if checkpoint.folder == EXAMPLE:  # which was trained on books
            self.kind_of_text = "prose"

    def _share(self, checkpoint: Checkpoint | None, context: int) -> None:
        self._checkpoint, self.context = checkpoint, context
        self.whole: Opened = self
        self.cache = Cache()

    @property
    def checkpoint(self) -> Checkpoint:
        """The files of the model. Raises UserError for a model in memory, which has none."""
        if self._checkpoint is None:
            raise UserError(f"{self.name} was given in memory: no files belong to it")
        return self._checkpoint

    @property
    def run(self) -> Path | None:
        """The folder of the run that trained the model; None where no run did."""
        return None if self._checkpoint is None else self._checkpoint.run

    @property
    def vocab_size(self) -> int | None:
        """Rows of the token embedding, where that is known."""
        return self.checkpoint.vocab_size

    @cached_property
    def model(self) -> Any:
        """The model; one without depth reads as `standard`, which computes the same. Raises UserError."""
        checkpoint, device = self.checkpoint, str(pick_device("auto"))
        if checkpoint.kind != "plain":
            return checkpoint.load("auto", device)
        return convert(checkpoint.name, "standard", trust_remote_code=checkpoint.trusted).to(device)

    @property
    def is_loaded(self) -> bool:
        """Whether its weights have been read."""
        return "model" in vars(self)

    def forget(self) -> None:
        """Drop the weights and all analyses; both are made again when they are next needed."""
        with self.cache.lock:
            self.cache.clear()
            for name in ("model", "residual"):
                vars(self).pop(name, None)

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokenizer. Raises UserError."""
        return self.checkpoint.tokenizer

    @property
    def encoder(self) -> Encoder:
        """The tokenizer with the model's limits. Raises UserError: no tokenizer."""
        return Encoder(self.tokenizer, self.name, self.context, self.vocab_size)

    def text_of(self, text: Any) -> str | None:
        """Return a text, given in letters or as ids, as the letters that one types into the page. Raises UserError: no
        text."""
        if text is None or isinstance(text, str):
            return text
        ids = prompt_ids(self.model, text)[0].tolist()
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    @cached_property
    def residual(self) -> Residual:
        """Its residual. Raises UserError: it has none."""
        return find_residual(self.model)

    @cached_property
    def sources(self) -> list[list[str]]:
        """The names of each read's sources, the same for all texts. Raises UserError: it mixes by no weights."""
        return source_names(self.model)

    @cached_property
    def layout(self) -> tuple[Read, ...]:
        """The reads."""
        return self.residual.layout()

    @cached_property
    def reads(self) -> list[str]:
        """Their names."""
        return [read.name for read in self.layout]

    @property
    def label(self) -> str:
        """Name, residual and, where the run says, training step."""
        step = f", step {self.step:,}" if self.step is not None else ""
        return f"{self.name} ({self.residual_name}{step})"

    @property
    def residual_name(self) -> str:
        """The name of its residual."""
        return self.checkpoint.residual or "standard"

    @cached_property
    def key(self) -> str:
        """The model's identity in links: name, step, and a hash of config and weights. The hash alone finds the model,
        whatever its name and folder are."""
        return key_of(self.name, self.step, self._content())

    def _content(self) -> bytes:
        """Return the bytes whose hash identifies the model."""
        return json.dumps(self.checkpoint.fields, sort_keys=True).encode() + self.checkpoint.weights.digest()

    @property
    def code(self) -> str:
        """The Python expression that opens the model, for the page's 'Show code'."""
        checkpoint = self.checkpoint
        return (
            f"attnres.load({checkpoint.name!r})"
            if checkpoint.kind != "plain"
            else f"attnres.convert({checkpoint.name!r}, 'standard')"
        )

    @cached_property
    def details(self) -> str:
        """Parameters, sublayers and context of the model, as a phrase."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters()) / 1e6
        sublayers = self.residual.num_sublayers
        implied = "" if self.residual.traits.by_token else "; weights are the same for every token"
        return f"{parameters:.1f}M parameters, {sublayers} sublayers, up to {self.context:,} tokens{implied}"

    @cached_property
    def vocabulary(self) -> int:
        """Hash of the tokenizer's vocabulary: two models with equal hashes have the same tokens."""
        return hash(frozenset(self.tokenizer.get_vocab().items()))

    @cached_property
    def similarity(self) -> tuple[list[Read], np.ndarray] | None:
        """The reads that have a pseudo-query, and the cosines between these queries (times their key gains);
        None with fewer than two. Reads of one source learn none."""
        cosines = query_cosine(self.residual)
        if cosines is None:
            return None
        with_query = [i for i, row in enumerate(cosines) if row[i] is not None]
        matrix = np.array([[cosines[i][j] for j in with_query] for i in with_query], dtype=float)
        return [self.layout[i] for i in with_query], matrix

    def piece(self, token: int) -> str:
        """Return the characters of a token."""
        return piece(self.tokenizer, token)


class Given(Opened):
    """A model in memory.

    Args:
        model: a model of Transformers (without depth reads it is shown as `standard`, which computes the same), a
            module of one's own, a method of one, or a `TextModel`.
        tokenizer: of Transformers or `tokenizers`; None is the model's own, or ids for letters: "12 7 5".
        name: for the page. context: tokens that the model takes, where it does not say.

    Raises:
        UserError: a module without a residual, one that makes no logits of ids, or no such tokenizer.
    """

    def __init__(self, model: Any, tokenizer: Any = None, *, name: str, context: int | None = None) -> None:
        if isinstance(model, PreTrainedModel) and not any(isinstance(one, Residual) for one in model.modules()):
            model = convert(model, "standard")
        self.__dict__["model"] = model = as_model(model)  # in the place of the cached property
        known = (context, stated_context(getattr(model, "config", None)), MAX_TOKENS)
        self._share(None, min(one for one in known if one is not None))
        self.name, self.step = name, None
        self._vocab_size = vocab_size(model)
        of_model = getattr(model, "tokenizer", None)
        if tokenizer is None and of_model is None and not isinstance(model, TextModel):
            with contextlib.suppress(UserError):
                of_model = tokenizer_of(model)
        chosen = of_model if tokenizer is None else tokenizer
        self.__dict__["tokenizer"] = id_tokenizer(self._vocab_size) if chosen is None else as_tokenizer(chosen)
        if chosen is None:
            self.opening_text = " ".join(str(number) for number in range(min(self._vocab_size, self.context, 24)))

    @property
    def vocab_size(self) -> int | None:
        return self._vocab_size

    @property
    def residual_name(self) -> str:
        return self.residual.name

    @property
    def code(self) -> str:
        return f"...  # {self.name}, as it was given to attnres.explore"

    def forget(self) -> None:
        with self.cache.lock:
            self.cache.clear()

    def _content(self) -> bytes:
        state = hashlib.sha256()
        tensors = {name: one for name, one in self.model.state_dict().items() if torch.is_tensor(one)}  # no extra state
        for name, tensor in tensors.items():
            values = tensor.detach().flatten()
            sample = values[:: max(1, len(values) // SAMPLE)].float().cpu().numpy()
            state.update(f"{name} {tuple(tensor.shape)}".encode() + sample.tobytes())
        return state.digest()


def id_tokenizer(rows: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of ids written in digits: "12 7 5" is three tokens."""
    backend = Tokenizer(WordLevel({str(number): number for number in range(rows)}))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


class Learned(Opened):
    """The residual of `whole`, a run's model, at an earlier step, as the snapshot `path` has it."""

    def __init__(self, whole: Opened, step: int, path: Path) -> None:
        self._share(whole.checkpoint, whole.context)
        self.name, self.step, self.path, self.whole = whole.name, step, path, whole

    @cached_property
    def model(self) -> Any:
        """Raises UserError: the weights of that step were not kept."""
        raise UserError(
            f"what {self.name} reads in a text at step {self.step:,} needs all weights of that step, and only the "
            f"residual's were kept: train with --keep-at {self.step}"
        )

    @property
    def label(self) -> str:
        return f"{self.name} (step {self.step:,}, residual alone)"

    def _content(self) -> bytes:
        return self.whole._content() + (self.path.read_bytes() if self.path.is_file() else b"")

    @cached_property
    def residual(self) -> Residual:
        """The residual. Raises UserError: a damaged snapshot."""
        return residual_at(self.checkpoint.config, self.path)

    @cached_property
    def sources(self) -> list[list[str]]:
        return [[source.name for source in read.sources] for read in self.layout]

    @cached_property
    def details(self) -> str:
        return f"{sum(one.numel() for one in self.residual.parameters()):,} parameters of the residual alone"

    def read(self, text: str, cuts: Iterable[Cut] = ()) -> Reading:
        """Raises UserError as `model`."""
        return self.model


def open_models(names: Sequence[str | Path], *, trust_remote_code: bool = False) -> list[Opened]:
    """Open the models of a command line, each preceded by the earlier steps of its run: the checkpoints that the run
    kept, and at its other evaluations the residual alone.

    Raises:
        UserError: no model there, or one whose reads mix no sources by weights.
    """
    named: dict[Opened, list[Opened]] = {}
    for name in names:
        model = Opened(name, trust_remote_code=trust_remote_code)
        model.sources  # noqa: B018  what cannot be shown is said at once
        run = model.run
        kept_folders = sorted((run / "kept").glob("[0-9]*")) if run is not None else []
        named[model] = [Opened(folder) for folder in kept_folders]
        whole = {one.step for one in (*named[model], model)}
        for step, path in snapshots(run).items() if run is not None else ():
            if step not in whole:
                named[model].append(Learned(model, step, path))
        named[model].sort(key=lambda one: one.step or 0)
    # The shortest titles that tell the models apart; where one is given twice, the shortest of all.
    checkpoints = [model.checkpoint for model in named]
    longest = max((len(one.folder.absolute().parts) for one in checkpoints), default=1)
    rows = [[one.title(parts) for one in checkpoints] for parts in range(1, longest + 1)]
    titles = next((row for row in rows if len(set(row)) == len(row)), rows[0])
    for (model, steps), title in zip(named.items(), titles, strict=True):
        for one in (*steps, model):
            one.name, one.whole = title, model
    return [one for model, steps in named.items() for one in (*steps, model)]


def find_demo(folder: Path) -> list[Path]:
    """Find the finished runs of `make demo` with depth reads, Block's and Full's, or else the package's own model."""
    runs = [run for label in ("block", "full") for run in sorted(folder.glob(f"{label}-seed*"))[:1]]
    return [run for run in runs if (run / "summary.json").is_file()] or [EXAMPLE]


TRIAL = 128
"""Tokens of the passes that settle the number of threads."""


def choose_threads(models: Sequence[Opened]) -> None:
    """Set torch to one thread where a timed pass is faster with one than with torch's own number of threads.

    Passes of a small model are short: on a busy machine threads wait for one another longer than they compute.
    """
    most = torch.get_num_threads()
    if most == 1 or any(model.model.device.type != "cpu" for model in models):
        return
    times = {}
    for threads in (1, most):
        torch.set_num_threads(threads)
        for _ in range(2):  # the first pass builds kernels and fills caches
            start = time.perf_counter()
            for model in models:
                model.read_ids((0,) * min(TRIAL, model.context), [], [])
            times[threads] = time.perf_counter() - start
    torch.set_num_threads(min(times, key=lambda threads: times[threads]))
