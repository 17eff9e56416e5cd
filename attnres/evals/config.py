"""What `attnres eval` and `attnres generate` take, as data; importing this loads no heavy library."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from attnres.evals.tasks import TASKS

Dtype = Literal["auto", "fp32", "bf16"]
"""Of the weights; auto keeps what they are stored in."""


@dataclass
class EvalConfig:
    """Score models on text and tasks; the differences of several are taken item by item, to the first."""

    models: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="MODEL ...")]
    """Run folders, model folders or hub names."""
    tasks: tuple[str, ...] = tuple(TASKS)
    """Names, files (.jsonl, .txt), or lm-eval:NAME for a task of lm-eval (needs the extra `eval`)."""
    data: str | None = None
    """Folder with the tasks' files, e.g. hellaswag_val.jsonl; none fetches them from the hub (extra `data`)."""
    limit: int | None = None
    """Only so many items of each task, and windows of a text; none is all."""
    window: int | None = None
    """Tokens in a window of perplexity; none is the shortest context of the models, at most 2048."""
    stride: int | None = None
    """Tokens between two sliding windows; none is half a window."""
    batch_tokens: int = 4096
    """Tokens in one forward pass, padding included."""
    dtype: Dtype = "auto"
    """Of the weights; auto is what they are stored in."""
    device: str = "auto"
    """auto (CUDA where there is one, else the CPU), cpu or cuda."""
    lm_eval_tasks: str | None = None
    """Folder with lm-eval task files (YAML) of your own, used in place of lm-eval's collection."""
    trust_remote_code: bool = False
    """Run code that comes with a model. Read it first."""


@dataclass
class GenerateConfig:
    """Print the text with which a model goes on from a prompt, as it comes."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A run folder, a model folder or a hub name."""
    prompt: str
    """What the text begins with."""
    max_new_tokens: int = 128
    """Stop after so many tokens, if the text or the model's context has not ended before."""
    greedy: bool = False
    """Always take the likeliest token."""
    temperature: float | None = None
    """Divides the logits before sampling; none is the model's own setting, else 1."""
    top_k: int | None = None
    """Sample from the k likeliest tokens; none is the model's own setting, else all."""
    top_p: float | None = None
    """Sample from the likeliest tokens that sum to this probability; none is the model's own setting, else 1."""
    seed: int = 0
    """Of the sampling."""
    chat: bool = False
    """The prompt is a user's turn, put into the model's chat template."""
    show_depth: bool = False
    """For each token a line: the heaviest sources of the output read, and of each block's reads on average."""
    beside: str | None = None
    """A second model: afterwards both decode in turn, and tokens/s of both are printed with their ratio."""
    dtype: Dtype = "auto"
    """Of the weights; auto is what they are stored in."""
    device: str = "auto"
    """auto (CUDA where there is one, else the CPU), cpu or cuda."""
    trust_remote_code: bool = False
    """Run code that comes with a model. Read it first."""
