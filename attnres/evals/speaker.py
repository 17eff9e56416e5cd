"""A loaded model with its tokenizer, which encodes prompts."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attnres.device import pick_device
from attnres.errors import UserError, foreign
from attnres.evals.config import Dtype
from attnres.models.open import open_checkpoint
from attnres.typed import is_text


@dataclass(frozen=True)
class Speaker:
    """A loaded model with its tokenizer."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context: int

    def encode(self, prompt: str, *, chat: bool = False) -> Tensor:
        """Token ids (1, T) of a prompt, or of a user's turn in the model's chat template.

        Raises:
            UserError: a prompt without a token, no chat template, or no room for a token more.
        """
        if not prompt:
            raise UserError("the prompt is empty: expected some text to go on from")
        if not is_text(prompt):
            raise UserError("the prompt is not valid UTF-8: expected text")
        if chat:
            if not self.tokenizer.chat_template:
                raise UserError(f"the tokenizer of {self.name} has no chat template: leave out --chat")
            turns = [{"role": "user", "content": prompt}]
            with foreign(f"the chat template of {self.name} makes no text", "leave out --chat"):
                text = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        else:
            ids = self.tokenizer(prompt, verbose=False)["input_ids"]
        if not ids:
            raise UserError(
                f"the tokenizer of {self.name} makes no token of the prompt: give one with words that it knows"
            )
        rows = cast(nn.Embedding, self.model.get_input_embeddings()).num_embeddings
        if max(ids) >= rows:
            raise UserError(
                f"the tokenizer of {self.name} gives id {max(ids)} and the model's embedding has {rows} rows: they "
                "belong to different models"
            )
        if len(ids) >= self.context:
            raise UserError(
                f"the prompt has {len(ids):,} tokens and {self.name} takes {self.context:,}: shorten it to leave room"
            )
        return torch.tensor([ids], device=self.model.device)


def open_speaker(
    name: str | Path, *, dtype: Dtype = "auto", device: str = "auto", trust_remote_code: bool = False
) -> Speaker:
    """Load a run folder, a model folder or a hub model with its tokenizer. Raises UserError."""
    checkpoint = open_checkpoint(name, trust_remote_code=trust_remote_code)
    model = checkpoint.load(dtype, str(pick_device(device)))
    if not model.can_generate():
        raise UserError(f"{name} is a {type(model).__name__}, which generates no text: give a causal language model")
    return Speaker(checkpoint.name, model, checkpoint.tokenizer, checkpoint.context)
