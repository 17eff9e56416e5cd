"""Generate text token by token with Transformers' `generate` and KV cache, and compare the speeds of two models."""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer
from transformers.generation.streamers import BaseStreamer

from attnres.device import in_turn, spread
from attnres.errors import UserError, foreign
from attnres.evals.config import Dtype, GenerateConfig, Sampling
from attnres.evals.decoding import Replays, decode_rate, why_not_captured
from attnres.head import evaluating
from attnres.inspect.contribution import Contributions
from attnres.inspect.recording import find_residual
from attnres.models.encoding import context_of, encode_prompt, piece, rows_of
from attnres.models.open import open_checkpoint
from attnres.ops.devices import forked_generators, pick_device
from attnres.residuals import Observer, Source, depths, watched_by
from attnres.text import number, visible
from attnres.training.environment import name_of

# ------------------------------------------------------------------ a model that speaks


@dataclass(frozen=True)
class Speaker:
    """A loaded model with its tokenizer, and its passes as CUDA graphs."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context: int
    replays: Replays = field(default_factory=Replays, compare=False, repr=False)

    def encode(self, prompt: str, *, chat: bool = False) -> Tensor:
        """Return the token ids (1, T) of a prompt, or of a user's turn in the model's chat template.

        Raises:
            UserError: as `encode_prompt`; or the context has no room for a further token.
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


# ------------------------------------------------------------------ what each token read


TOP = 3
"""Sources of the output read that are printed: those of the largest absolute contributions."""

PARTS = 8
"""Parts of the depth for the summary of a network without blocks: as many as Block has by default."""


LEGEND = """\
each new token | the largest sources of the output read and their contributions, parts of the read that sum to one | for
each block b1, b2, ... of sublayers the source that contributes most to its reads on average
(emb embedding, part the block's own sum so far, b block, a attention, m mlp; stream the running sum, state an earlier
state of it)"""


@dataclass(frozen=True)
class TokenDepth:
    """A new token and the sources that its prediction read.

    Attributes:
        token: its id; `text`: its text.
        output: (source, contribution) of the output read, the largest first; contributions as in
            `attnres.inspect.contribution`, signed and summing to one.
        blocks: for each block (or part of the depth): its name, the source that contributes most to its reads on
            average, and that contribution.
    """

    token: int
    text: str
    output: list[tuple[Source, float]]
    blocks: list[tuple[str, Source, float]]

    def line(self) -> str:
        """Return one line: the token, the largest sources of the output, and each block's largest source."""
        output = ", ".join(f"{source.label} {number(part, 2)}" for source, part in self.output[:TOP])
        blocks = "  ".join(f"{name} {source.short} {number(part, 2)}" for name, source, part in self.blocks)
        return f"{visible(self.text):14} output: {output} | {blocks}"


class DepthReader(Observer):
    """Watches the reads of a model while it generates, one sequence at a time; does not change any value.

    Raises:
        UserError: the model's residual has no weights to show, or is being recorded already.
    """

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        try:
            residual = find_residual(model)
        except UserError as error:
            raise UserError(
                f"{type(model).__name__} has no depth reads to show: give a model of attnres, or leave out --show-depth"
            ) from error
        if not residual.traits.by_token:
            raise UserError(
                f"residual '{residual.name}' has the same weights for every token: --show-depth needs one whose "
                "weights differ, such as block"
            )
        if residual.observer is not None:
            raise UserError("this model is being recorded already: end the first recording before a second")
        self.residual, self.tokenizer = residual, tokenizer
        layout = residual.layout()
        self.contributions = Contributions(len(layout), keep=True)
        self.sources, self.depths = [read.sources for read in layout], depths(layout)

    def __enter__(self) -> Self:
        self.watching = watched_by(self.residual, observer=self)
        self.watching.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.watching.__exit__(kind, error, traceback)

    def on_start(self, embedding: Tensor) -> None:
        self.contributions.start(_last(embedding))

    @torch.no_grad()
    def on_read(self, read: int, h: Tensor, weights: Tensor | None, values: Sequence[Tensor]) -> None:
        assert weights is not None
        self.contributions.read(read, _last(h), _last(weights).float(), [_last(value) for value in values], None)

    def on_write(self, index: int, output: Tensor) -> None:
        self.contributions.write(_last(output))

    def read(self, token: int) -> TokenDepth:
        """Return the sources of the pass that predicted `token`; call it before the next pass."""
        sublayers = self.residual.num_sublayers
        rows = {index: parts[0].tolist() for index, parts in self.contributions.tokens.items()}
        output = sorted(zip(self.sources[-1], rows[len(self.sources) - 1]), key=lambda pair: -abs(pair[1]))
        blocks = []
        sealed = [source for row in self.sources for source in row if source.kind in ("block", "state")]
        ends = {source.span.stop - 1 for source in sealed if source.span} or set(
            range(0, sublayers, -(-sublayers // PARTS))
        )
        bounds = sorted({0, *ends, sublayers})
        for block, (start, stop) in enumerate(pairwise(bounds), 1):
            reads = [index for index, sublayer in enumerate(self.depths) if start <= sublayer < stop]
            sums: dict[str, float] = {}
            sources: dict[str, Source] = {}
            for index in reads:
                for source, part in zip(self.sources[index], rows[index]):
                    sums[source.name] = sums.get(source.name, 0.0) + part / len(reads)
                    sources[source.name] = source
            largest = max(sums, key=lambda name: abs(sums[name]))
            blocks.append((f"b{block}", sources[largest], sums[largest]))
        return TokenDepth(token, piece(self.tokenizer, token), output, blocks)


def _last(values: Tensor) -> Tensor:
    """Return the last position of the pass, which predicts the next token: (1, ...)."""
    return values.flatten(0, -2)[-1:]


# ------------------------------------------------------------------ one text


def generate(
    model: str | Path | PreTrainedModel | Speaker,
    prompt: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 128,
    greedy: bool = False,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    chat: bool = False,
    on_text: Callable[[str], None] | None = None,
    on_token: Callable[[TokenDepth], None] | None = None,
    trust_remote_code: bool = False,
) -> str:
    """Return the text that the model generates after `prompt`.

    >>> attnres.generate("runs/mine", "def main():")  # doctest: +SKIP

    Args:
        model: a run folder, a model folder, a hub name, a model in memory (then with its `tokenizer`), or a Speaker.
        max_new_tokens: upper bound; generation ends earlier at the end of the text or of the model's context.
        greedy, temperature, top_k, top_p, seed: fields of `Sampling`.
        chat: the prompt is a user's turn in the model's chat template.
        on_text: called with each piece of the text as soon as it is decoded.
        on_token: called after each token with its `TokenDepth`; needs a residual with weights.

    Raises:
        UserError: see `Speaker.encode`, `Sampling.check`, `open_checkpoint`.
    """
    sampling = Sampling(greedy=greedy, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    sampling.check()
    _check_length(max_new_tokens)
    if isinstance(model, Speaker):
        speaker = model
    elif isinstance(model, str | Path):
        speaker = open_speaker(model, trust_remote_code=trust_remote_code)
    elif tokenizer is None:
        raise UserError("a model in memory needs its tokenizer: pass tokenizer=..., or give the model's folder")
    else:
        speaker = Speaker(type(model).__name__, model, tokenizer, context_of(model.config, tokenizer))
    ids = speaker.encode(prompt, chat=chat)
    new = min(max_new_tokens, speaker.context - ids.shape[1])
    settings, on_id = _settings(speaker.model, sampling, new), None
    with ExitStack() as stack:
        if on_token is not None:
            reader = stack.enter_context(DepthReader(speaker.model, speaker.tokenizer))
            on_id = lambda token: on_token(reader.read(token))  # noqa: E731
        return _run(speaker, ids, settings, _Streamer(speaker.tokenizer, on_text, on_id), seed)


def speak(config: GenerateConfig) -> None:
    """Run `attnres generate`: print the prompt and the text as it comes, or a line a token; then the speeds."""
    options: dict[str, Any] = {
        "dtype": config.dtype,
        "device": config.device,
        "trust_remote_code": config.trust_remote_code,
    }
    config.check()
    _check_length(config.max_new_tokens)
    names = ("max_new_tokens", "chat", *(one.name for one in fields(Sampling)))
    how: dict[str, Any] = {name: getattr(config, name) for name in names}
    first = open_speaker(config.model, **options)
    second = open_speaker(config.beside, **options) if config.beside is not None else None
    if second is not None:  # errors of the timing are raised before anything is printed
        fitting((first, second), config.prompt, config.max_new_tokens)
    if config.show_depth:
        print(LEGEND, file=sys.stderr)
        generate(first, config.prompt, on_token=lambda token: print(token.line(), flush=True), **how)
    else:
        first.encode(config.prompt, chat=config.chat)  # errors of the prompt are raised before it is printed
        print(config.prompt, end="\n\n" if config.chat else "", flush=True)
        try:
            generate(first, config.prompt, on_text=lambda text: print(text, end="", flush=True), **how)
        finally:
            print(flush=True)
    if second is not None:
        print(beside((first, second), config.prompt, config.max_new_tokens))


# ------------------------------------------------------------------ the speeds of two models


ROUNDS = 7
"""Timed rounds, after one untimed round; an odd number, for the median and quartiles of ratios."""


def fitting(speakers: Sequence[Speaker], prompt: str, tokens: int) -> tuple[list[Tensor], int]:
    """Return a prompt's ids (1, T) for each model's tokenizer, and how many of `tokens` new tokens fit into all
    contexts.

    Raises:
        UserError: see `Speaker.encode`; fewer than two fit.
    """
    prompts = [speaker.encode(prompt) for speaker in speakers]
    tokens = min(tokens, *(speaker.context - ids.shape[1] for speaker, ids in zip(speakers, prompts)))
    if tokens < 2:
        raise UserError("timing needs two tokens or more: raise --max-new-tokens, or shorten the prompt")
    return prompts, tokens


def beside(speakers: Sequence[Speaker], prompt: str, tokens: int, rounds: int = ROUNDS) -> str:
    """Time two models greedily decoding `tokens` tokens after `prompt`, interleaved, without the prompt's own pass;
    return their tokens per second and the ratio of these, round by round, in one sentence.

    Raises:
        UserError: see `fitting`.
    """
    first, second = speakers
    prompts, tokens = fitting(speakers, prompt, tokens)
    measures = [partial(decode_rate, speaker.model, ids, tokens) for speaker, ids in zip(speakers, prompts)]
    rates = in_turn(dict(zip("ab", measures, strict=True)), rounds=rounds, warm_up=1)
    ratio = spread(rates["a"], rates["b"])
    low, high = ratio.ratio_quartiles
    return (
        f"{first.name} {ratio.median:,.1f} tokens/s, {second.name} {spread(rates['b']).median:,.1f}: ratio "
        f"{ratio.ratio:.3f} (quartiles {low:.3f} to {high:.3f}, {rounds} rounds of {tokens} tokens in turn, "
        f"{name_of(first.model.device)})"
    )


# ------------------------------------------------------------------ one pass of Transformers' generate


def _check_length(max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {max_new_tokens}: expected a whole number, at least 1")


def _run(speaker: Speaker, ids: Tensor, settings: GenerationConfig, streamer: BaseStreamer, seed: int) -> str:
    model = speaker.model
    broken = foreign(f"{speaker.name} generates nothing", "are its weights finite, and is its config.json unchanged?")
    more: dict[str, Any] = {}
    with ExitStack() as stack:
        for context in (broken, evaluating(model), forked_generators([model.device]), torch.inference_mode()):
            stack.enter_context(context)
        if why_not_captured(model) is None:
            settings.disable_compile = True  # Transformers compiles for static caches by default
            length = ids.shape[1] + int(settings.max_new_tokens or 0)
            more["past_key_values"] = stack.enter_context(speaker.replays.of(model, length))
        torch.manual_seed(seed)
        out = model.generate(  # ty: ignore[not-callable]
            ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=streamer, **more
        )
    return str(speaker.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def _settings(model: PreTrainedModel, sampling: Sampling, new: int) -> GenerationConfig:
    """Return the given sampling settings, else the model's own; never Transformers' default top_k of 50."""
    defaults: Any = model.generation_config
    end = defaults.eos_token_id
    pad = defaults.pad_token_id if defaults.pad_token_id is not None else (end[0] if isinstance(end, list) else end)

    def pick(explicit: Any, theirs: Any, otherwise: Any) -> Any:
        return next(value for value in (explicit, theirs, otherwise) if value is not None)

    with foreign("generation_config.json of the model is not valid", "fix or remove it"):
        return GenerationConfig(
            max_new_tokens=new,
            do_sample=not sampling.greedy,
            temperature=1.0 if sampling.greedy else pick(sampling.temperature, defaults.temperature, 1.0),
            top_k=50 if sampling.greedy else pick(sampling.top_k, defaults.top_k, 0),
            top_p=1.0 if sampling.greedy else pick(sampling.top_p, defaults.top_p, 1.0),
            num_beams=1,
            pad_token_id=0 if pad is None else pad,
            use_cache=True,
        )


class _Streamer(TextStreamer):
    """Passes on whole words and characters as soon as they are decoded, and the id of each new token."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        on_text: Callable[[str], None] | None,
        on_id: Callable[[int], None] | None,
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text, self.on_id, self.prompt_seen = on_text, on_id, False

    def put(self, value: Tensor) -> None:
        if self.on_text is not None:
            super().put(value)
        if self.on_id is not None and self.prompt_seen:
            self.on_id(int(value.flatten()[0]))
        self.prompt_seen = True

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.on_text is not None and text:
            self.on_text(text)
