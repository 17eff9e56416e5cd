"""A loaded model with its tokenizer, which encodes prompts."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attnres.device import pick_device
from attnres.errors import UserError
from attnres.evals.config import Dtype
from attnres.models.encoding import encode_prompt, rows_of
from attnres.models.open import open_checkpoint


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
            UserError: as `encode_prompt`; no room for a token more.
        """
        ids, _ = encode_prompt(
            self.tokenizer,
            prompt,
            rows=rows_of(self.model),
            context=self.context,
            room=1,
            chat=chat,
            name=self.name,
            what="the prompt",
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
