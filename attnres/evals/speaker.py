"""A loaded model with its tokenizer, which encodes prompts; and the decoding speed of two, interleaved."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from attnres.device import in_turn, spread
from attnres.errors import UserError
from attnres.evals.config import Dtype
from attnres.evals.replays import Replays
from attnres.models.encoding import encode_prompt, rows_of
from attnres.models.open import open_checkpoint
from attnres.ops.devices import pick_device
from attnres.training.environment import name_of


@dataclass(frozen=True)
class Speaker:
    """A loaded model with its tokenizer, and its passes as CUDA graphs."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context: int
    replays: Replays = field(default_factory=Replays, compare=False, repr=False)

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


ROUNDS = 7
"""Timed rounds, after one that is not: an odd number, for the median and quartiles of the rounds' ratios."""


@dataclass(frozen=True)
class Speeds:
    """Tokens per second while decoding with a KV cache; the prompt's own pass is not counted.

    Attributes:
        names, medians: of the two models.
        ratio, quartiles: first over second, of the rounds' ratios: median, first and third quartile.
        tokens, rounds, device: decoded in a round; how many rounds; where.
    """

    names: tuple[str, str]
    medians: tuple[float, float]
    ratio: float
    quartiles: tuple[float, float]
    tokens: int
    rounds: int
    device: str

    def line(self) -> str:
        """Return all of it in one sentence."""
        (first, second), (low, high) = self.medians, self.quartiles
        return (
            f"{self.names[0]} {first:,.1f} tokens/s, {self.names[1]} {second:,.1f}: ratio {self.ratio:.3f} (quartiles "
            f"{low:.3f} to {high:.3f}, {self.rounds} rounds of {self.tokens} tokens in turn, {self.device})"
        )


def fitting(speakers: Sequence[Speaker], prompt: str, tokens: int) -> tuple[list[Tensor], int]:
    """Return a prompt's ids (1, T) in each model's tokens, and how many of `tokens` fit into all of them after it.

    Raises:
        UserError: see `Speaker.encode`; fewer than two fit.
    """
    prompts = [speaker.encode(prompt) for speaker in speakers]
    tokens = min(tokens, *(speaker.context - ids.shape[1] for speaker, ids in zip(speakers, prompts)))
    if tokens < 2:
        raise UserError("timing needs two tokens or more: raise --max-new-tokens, or shorten the prompt")
    return prompts, tokens


def beside(speakers: Sequence[Speaker], prompt: str, tokens: int, rounds: int = ROUNDS) -> Speeds:
    """Time two models greedily decoding `tokens` tokens after `prompt`, in turn.

    Raises:
        UserError: see `fitting`.
    """
    first, second = speakers
    prompts, tokens = fitting(speakers, prompt, tokens)
    measures = [partial(decode_rate, speaker.model, ids, tokens) for speaker, ids in zip(speakers, prompts)]
    rates = in_turn(dict(zip("ab", measures, strict=True)), rounds=rounds, warm_up=1)
    ratio = spread(rates["a"], rates["b"])
    return Speeds(
        (first.name, second.name),
        (ratio.median, spread(rates["b"]).median),
        ratio.ratio,
        (ratio.ratio_quartiles[0], ratio.ratio_quartiles[1]),
        tokens,
        rounds,
        name_of(first.model.device),
    )


class _Clock(BaseStreamer):
    """Notes when the prompt and each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())  # the value is on the CPU: the device has finished this token

    def end(self) -> None:
        pass


def decode_rate(model: PreTrainedModel, ids: Tensor, tokens: int) -> float:
    """Return tokens per second of greedy decoding with a KV cache, from the first new token after `ids` (1, T) to the
    last."""
    clock = _Clock()
    settings = GenerationConfig(
        max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, num_beams=1, pad_token_id=0, use_cache=True
    )
    with torch.inference_mode():
        model.generate(  # ty: ignore[not-callable]
            ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=clock
        )
    return (tokens - 1) / (clock.times[-1] - clock.times[1])
