"""Options of `attnres eval` and `attnres generate`, as dataclasses; importing this loads no heavy library."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from attnres.errors import UserError
from attnres.evals.tasks import TASKS

Dtype = Literal["auto", "fp32", "bf16"]
"""Dtype of the weights; auto is the stored one."""


@dataclass
class EvalConfig:
    """Score models on text and tasks; several models are compared with the first, paired by item."""

    models: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="MODEL ...")]
    """Run folders, model folders or hub names."""
    tasks: tuple[str, ...] = tuple(TASKS)
    """Names, files (.jsonl, .txt), or lm-eval:NAME for a task of lm-eval (needs the extra `eval`)."""
    data: str | None = None
    """Folder with the tasks' files, e.g. hellaswag_val.jsonl; none fetches them from the hub (extra `data`)."""
    limit: int | None = None
    """At most this many items of each task, or windows of a text; none is all."""
    window: int | None = None
    """Tokens in a window of perplexity; none is the shortest context of the models, at most 2048."""
    stride: int | None = None
    """Tokens between two sliding windows; none is half a window."""
    batch_tokens: int = 4096
    """Tokens in one forward pass, padding included."""
    dtype: Dtype = "auto"
    """Dtype of the weights; auto is the stored one."""
    device: str = "auto"
    """auto (CUDA where there is one, else the CPU), cpu or cuda."""
    lm_eval_tasks: str | None = None
    """Folder with lm-eval task files (YAML) of your own, used in place of lm-eval's collection."""
    trust_remote_code: bool = False
    """Run code that comes with a model. Read it first."""


LOWEST = 1e-6
"""Lowest temperature: dividing logits by it gives no infinity."""


@dataclass(kw_only=True)
class Sampling:
    """How the next token is chosen."""

    greedy: bool = False
    """Always take the likeliest token, after the model's own penalties (a repetition penalty)."""
    temperature: float | None = None
    """Divides the logits before sampling; none is the model's own setting, else 1."""
    top_k: int | None = None
    """Sample from the k likeliest tokens; none is the model's own setting, else all."""
    top_p: float | None = None
    """Sample from the likeliest tokens that sum to this probability; none is the model's own setting, else 1."""
    seed: int = 0
    """Seed of the sampling; the global random state does not change."""

    def check(self) -> None:
        """Raise UserError for impossible values."""
        if self.greedy and any(value is not None for value in (self.temperature, self.top_k, self.top_p)):
            raise UserError("greedy takes the likeliest token: leave out temperature, top_k and top_p, or greedy")
        if self.temperature is not None and not LOWEST <= self.temperature < float("inf"):
            raise UserError(
                f"temperature is {self.temperature}: expected {LOWEST} or more, or greedy for the likeliest token"
            )
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed is {self.seed}: expected a whole number from 0 to {2**63 - 1}")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}: expected a whole number, at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: expected a number above 0, at most 1")


@dataclass
class Continuation:
    """What is continued; a base class, so that --help lists it first."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A run folder, a model folder or a hub name."""
    prompt: str
    """Text to continue."""
    max_new_tokens: int = 128
    """Stop after this many tokens, or earlier at the end of the text or of the model's context."""


@dataclass
class GenerateConfig(Sampling, Continuation):
    """Continue a prompt with a model and print the text token by token."""

    chat: bool = False
    """The prompt is a user's turn, put into the model's chat template."""
    show_depth: bool = False
    """Print a line a token: the sources that contribute most to the output read, and to each block's reads on
    average."""
    beside: str | None = None
    """A second model: afterwards both decode, interleaved, and tokens/s of both are printed with their ratio."""
    dtype: Dtype = "auto"
    """Dtype of the weights; auto is the stored one."""
    device: str = "auto"
    """auto (CUDA where there is one, else the CPU), cpu or cuda."""
    trust_remote_code: bool = False
    """Run code that comes with a model. Read it first."""
