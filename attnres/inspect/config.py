"""What the commands that look into models take, as data; importing this loads no heavy library."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro


@dataclass(kw_only=True)
class CorpusConfig:
    """What is read, from wherever it comes."""

    corpus: str | None = None
    """stdlib, a file or folder (.txt, .md, .jsonl, .parquet, .py, ...), or hub:NAME[:CONFIG[:SPLIT]]: many documents;
    attnres prepare --help names all kinds of sources."""
    column: str = "text"
    """Field or column that holds the text, of rows."""
    trust_remote_code: bool = False
    """Run code that comes with a model. Read it first."""


@dataclass(kw_only=True)
class LookConfig(CorpusConfig):
    """What is looked at: a text or a corpus, and how much of it."""

    text: str | None = None
    """A text, shown token by token."""
    file: str | None = None
    """A text file, shown token by token."""
    limit: int = 20_000
    """Read at most this many tokens of the text or corpus."""
    context: int | None = None
    """Tokens in a window; none is the model's context, at most 2048."""
    device: str = "auto"
    """auto (CUDA where there is one, else the CPU), cpu or cuda."""
    progress: bool = True
    """Show a progress bar."""
    by: Literal["contribution", "weight"] = "contribution"
    """Order sources by their contribution to a read, or by their weight in it."""


@dataclass
class OneModelConfig(LookConfig):
    """One model that is looked into, and how it runs."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A run folder, a model folder or a hub name; with depth reads, or another residual of attnres."""
    batch_tokens: int = field(default=4096, kw_only=True)
    """Tokens in one forward pass."""
    dtype: Literal["auto", "fp32", "bf16"] = field(default="auto", kw_only=True)
    """Dtype of the weights; auto is the stored one."""


@dataclass
class InspectConfig(OneModelConfig):
    """Show the contributions to every read of a model, on a text or a corpus: tables here, figures and JSON with --out.

    Without a text, a run folder is inspected on what it was trained on.
    """

    kind: Literal["auto", "code", "prose"] = "auto"
    """Kind of the text, which decides the kinds of tokens that are told apart."""
    out: str | None = None
    """Folder for inspection.json, the figures, and a JSON file for each of the options below."""
    prune: bool = False
    """Also report which sources get hardly any weight, and the loss when they are ablated."""
    threshold: float = 0.01
    """With --prune: the weight below which a connection counts as hardly read."""
    knock_out: tuple[str, ...] = ()
    """SOURCE or SOURCE@READ, e.g. embedding, "block 2@output", embedding@mlp3, embedding@attention: the loss when
    it is ablated, each on its own."""
    attribute: bool = False
    """Of a text: which connections (source to read) the next prediction depends on, by ablation and by gradient."""
    patch: str | None = None
    """Of a text: another text from which each connection's vectors are taken, one connection at a time, and how much of
    that text's prediction this restores. Texts of other lengths are aligned by the tokens that both have."""
    lens: bool = False
    """Of a text: what each read says if it goes through the final norm and the head (logit lens)."""
    position: int = -1
    """With --attribute, --patch, --lens or --knock-out: the prediction after this token of the text, from 0 on;
    negative ones count from the end."""
    target: str | None = None
    """With --attribute, --patch or --lens: the token whose probability is explained, in letters; none is the text's
    next token, after the last the likeliest (with --patch the other text's likeliest)."""
    against: str | None = None
    """With --attribute or --patch: explain the target rather than this token: ln p of one less that of the other."""
    graph: bool = False
    """With --attribute and --out: also draw it, in graph.svg and edges.svg, and write its graph of tokens and layers,
    graph.json, as Neuronpedia reads it."""
    since: int | None = None
    """Of a run: also the changes since that step of its training, one of its validations: how far queries turned and,
    if that step's checkpoint was kept (train --keep-at), the contributions then."""


@dataclass
class SearchConfig(OneModelConfig):
    """Find the tokens at which a source contributes most to a read, with the text around them.

    Without a text, a run folder is searched on what it was trained on.
    """

    edge: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE@READ")]
    """One source of one read, e.g. embedding@mlp3, "block 2@output"."""
    least: bool = False
    """Find the tokens at which the source contributes least, instead of most."""
    top: int = 20
    """Number of tokens to print."""
    out: str | None = None
    """JSON file to write the same to."""
