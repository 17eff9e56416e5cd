"""The model that is looked at and the text that it is given: how token ids become logits, whoever made the model."""

import inspect
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from attnres.errors import UserError, first_line
from attnres.head import evaluating, log_probs
from attnres.inspect.recording import find_residual
from attnres.models.encoding import check_ids, check_length, encode_prompt, piece, rows_of, stated_context, tokenise
from attnres.residuals.watch import unwatched, watched_by
from attnres.text import visible

Text = str | Tensor | Sequence[int]
"""One text: in letters, for a model with a tokenizer, or its token ids, (T,) or (1, T)."""
Token = int | str
"""A token: its id, or its letters."""
Model = nn.Module | Callable[..., Any]
"""A model of Transformers; a module that makes logits (B, T, V) of ids (B, T), or a method of it; or a `TextModel`."""


class _Start:
    """An observer that keeps the shape of the embedding."""

    shape = torch.Size()

    def on_start(self, embedding: Tensor) -> None:
        self.shape = embedding.shape

    def on_read(self, read: int, h: Tensor, weights: Tensor | None, values: Sequence[Tensor]) -> None: ...

    def on_write(self, index: int, output: Tensor) -> None: ...


class TextModel(nn.Module):
    """A module of one's own as a model of text, for the functions of `attnres.inspect`.

    >>> import attnres
    >>> effect = attnres.inspect.effect(TextModel(model, tokenizer=tokenizer), "a = b", edit)  # doctest: +SKIP

    Args:
        module: it has a residual of `make_residual` or `attach`.
        forward: makes logits (B, T, V) of ids (B, T); None is the module itself. A tuple's first, and an output's
            `logits`, are taken too.
        tokenizer: of Transformers or `tokenizers`, for texts in letters.
        head: makes logits of the output's normed read (..., d), for `logit_lens`; None finds the linear layer.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[[Tensor], Any] | None = None,
        *,
        tokenizer: Any = None,
        head: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        find_residual(module)  # says what is wrong with it
        self.module = module
        self._functions = forward or module, head  # a tuple: their modules are registered once
        self.tokenizer = None if tokenizer is None else as_tokenizer(tokenizer)

    @property
    def head(self) -> Callable[[Tensor], Tensor] | None:
        """What makes logits of the normed read, where it was given."""
        return self._functions[1]

    @property
    def name(self) -> str:
        """The class of the module, for messages."""
        return type(self.module).__name__

    @cached_property
    def vocab_size(self) -> int:
        """V, of a pass of two tokens.

        Raises:
            UserError: the module makes no logits of token ids, or its stream is not (batch, time, width).
        """
        ids = torch.zeros(1, 2, dtype=torch.long, device=device_of(self))
        residual, start = find_residual(self), _Start()
        try:
            with evaluating(self), torch.no_grad(), unwatched(residual), watched_by(residual, observer=start):
                logits = self(ids).logits
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{self.name} takes no token ids ({first_line(error)}): give TextModel(module, function) with what "
                "makes logits of ids; record, intervene and from_trace look at a module of any inputs"
            ) from error
        if start.shape[:-1] != ids.shape:
            raise UserError(
                f"the hidden state of {self.name} is {tuple(start.shape)} for ids {tuple(ids.shape)}: expected (batch, "
                "time, width); record, intervene and from_trace look at a module of any layout"
            )
        return logits.shape[-1]

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        """Return `logits` (B, T, V). Raises UserError."""
        out = self._functions[0](input_ids)
        out = getattr(out, "logits", out[0] if isinstance(out, tuple | list) else out)
        if not isinstance(out, Tensor) or out.dim() != 3 or out.shape[:2] != input_ids.shape:
            got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise UserError(
                f"{self.name} makes {got} of ids {tuple(input_ids.shape)}: expected logits, one row a token; give "
                "TextModel(module, function) with what makes them"
            )
        return SimpleNamespace(logits=out)


def as_model(model: Model) -> Any:
    """Return a model that takes `input_ids` and returns `logits`: one of Transformers as it is, any other as a
    `TextModel`.

    Raises:
        UserError: a function of no module, or a module without a residual.
    """
    if isinstance(model, TextModel) or hasattr(model, "get_input_embeddings"):
        return model
    if isinstance(model, nn.Module):
        return TextModel(model)
    owner = getattr(model, "__self__", None)
    if isinstance(owner, nn.Module) and callable(model):
        return TextModel(owner, model)
    raise UserError(
        f"{getattr(model, '__name__', type(model).__name__)} is no module, so its residual cannot be found: give "
        "attnres.inspect.TextModel(module, function)"
    )


def as_tokenizer(tokenizer: Any) -> PreTrainedTokenizerBase:
    """Return a tokenizer of Transformers; one of `tokenizers` is made that. Raises UserError for any other."""
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    if isinstance(tokenizer, Tokenizer):
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    raise UserError(
        f"the tokenizer is {type(tokenizer).__name__}: expected one of Transformers or of tokenizers, or texts as ids"
    )


def device_of(model: nn.Module) -> torch.device:
    """Return where ids go: the device of the embedding, or of the first parameter."""
    table: Any = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None  # ty: ignore[not-callable]
    return next(model.parameters()).device if table is None else table.weight.device


def vocab_size(model: Any) -> int:
    """Return how many ids there are. Raises UserError for a module that makes no logits of ids."""
    return model.vocab_size if isinstance(model, TextModel) else rows_of(model)


def tokenizer_of(model: Any) -> Any:
    """Return the tokenizer of a `TextModel`, or the one beside the files of a model, read once.

    Raises:
        UserError: the model comes from no folder or name that has one.
    """
    if isinstance(model, TextModel):
        if model.tokenizer is None:
            raise UserError(
                f"text was given in letters, and {model.name} has no tokenizer: give ids, or TextModel's own"
            )
        return model.tokenizer
    if getattr(model, "read_tokenizer", None) is None:
        from transformers import AutoTokenizer

        folder = getattr(model, "tokenizer_folder", None) or getattr(model, "name_or_path", "")
        try:
            model.read_tokenizer = AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # Transformers raises many kinds
            raise UserError(
                "text was given in letters, and the model has no tokenizer beside it: give token ids, or load the "
                "model from its folder"
            ) from error
    return model.read_tokenizer


class Speller:
    """Spells a token, its white space visible; its id where the model has no tokenizer, which is read at first use.

    A copy that leaves the process, as by pickle, says ids.
    """

    def __init__(self, model: Any = None) -> None:
        self._model = None if model is None else weakref.ref(model)  # a result keeps no model in memory
        self._own = model.tokenizer if isinstance(model, TextModel) else None

    @cached_property
    def _tokenizer(self) -> Any:
        model = None if self._model is None else self._model()
        try:
            return self._own if self._own is not None or model is None else tokenizer_of(model)
        except UserError:
            return None

    def __call__(self, token: int) -> str:
        return str(token) if self._tokenizer is None else visible(piece(self._tokenizer, token))

    def __reduce__(self) -> Any:
        return (Speller, ())

    def __deepcopy__(self, memo: Any) -> "Speller":
        return self


def token_id(model: Any, token: Token) -> int:
    """Return the id of a token, given by it or by its letters.

    Raises:
        UserError: letters that are not one token, or that the tokenizer does not know; an id outside the vocabulary.
    """
    if isinstance(token, str):
        ids = tokenise(tokenizer_of(model), token)[0]
        if len(ids) != 1:
            raise UserError(f"'{token}' is {len(ids)} tokens: give one, with the space before it if there is one")
        return int(ids[0])
    if not 0 <= token < vocab_size(model):
        raise UserError(f"target is {token}: expected a token id from 0 to {vocab_size(model) - 1}")
    return int(token)


def prompt_ids(model: Any, input_ids: Text) -> Tensor:
    """Return one text's ids (1, T) on the model's device.

    Raises:
        UserError: an empty text, several at once, one longer than the model's context, ids outside its vocabulary;
            letters for a model without a tokenizer, or that its tokenizer does not know.
    """
    rows, context = vocab_size(model), stated_context(getattr(model, "config", None))
    if isinstance(input_ids, str):
        input_ids = encode_prompt(tokenizer_of(model), input_ids, rows=rows, context=context)[0]
    try:
        ids = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"a text is {type(input_ids).__name__}: expected letters or token ids ({error})") from error
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1:
        raise UserError(f"ids of shape {tuple(ids.shape)}: expected those of one text, (T,) or (1, T)")
    if not ids.numel():
        raise UserError("the text is empty: give at least one token")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UserError(f"ids are {ids.dtype}: expected whole numbers")
    check_length(ids.numel(), context, "the model")
    check_ids(ids, rows)
    return ids.long().unsqueeze(0).to(device_of(model))


def last_log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    """Return log-probabilities (B, V) after the last token, in at least fp32."""
    forward: Any = model.forward
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(forward).parameters else {}
    return log_probs(model(input_ids=ids, use_cache=False, **keep).logits[:, -1])
