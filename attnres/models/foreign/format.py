"""The interface of a foreign format of depth reads: from its config and names to ours, and for some back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from attnres.errors import UserError
from attnres.models.classes import CLASSES
from attnres.models.config import FIELDS
from attnres.residuals import Residual

Config = dict[str, Any]


class Target(NamedTuple):
    """A foreign config as one of this package: a family, its fields, a residual and its settings."""

    family: str
    fields: Config
    residual: str
    settings: Config


class WeightRule(NamedTuple):
    """One foreign tensor of the depth reads: row `index` of our `residual.{ours}`, with its shape in the foreign
    file."""

    ours: str
    index: int
    theirs: str
    shape: tuple[int, ...]


class Stack(NamedTuple):
    """Foreign tensors of one shape whose rows, concatenated, are one parameter here.

    Attributes:
        names: the tensors, in order.
        groups: the number of experts over which the rows are then divided; 0 for a parameter without experts.
    """

    names: list[str]
    groups: int


@dataclass(frozen=True)
class Stored:
    """A tensor that is read from its file, and computed, each time it is indexed.

    Transformers' loader indexes the values of a state dict one after the other, so memory holds little more than the
    model.
    """

    read: Callable[[], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None for a dtype that no parameter has."""

    def __getitem__(self, index: Any) -> Tensor:
        return self.read()[index]


class Format:
    """One project's format.

    Attributes:
        name: its name in this package.
        renamed: parts of names of the other weights, (theirs, ours).
        transposed: ends of names of matrices that are stored transposed.
        ignored: ends of names of buffers that are no weights.
        beside: starts of names of weights outside the text decoder, which are left out.
        optional: ends of our names of weights that are zero if the checkpoint lacks them.
        table: our name of the token embedding.
    """

    name: ClassVar[str]
    renamed: ClassVar[tuple[tuple[str, str], ...]] = ()
    transposed: ClassVar[tuple[str, ...]] = ()
    ignored: ClassVar[tuple[str, ...]] = ()
    beside: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()
    table: ClassVar[str] = "model.embed_tokens.weight"

    def matches(self, config: Config) -> bool:
        """Return whether a config is of this kind."""
        raise NotImplementedError

    def read(self, config: Config) -> Target:
        """Return a config of this format as ours. Raises UserError for anything that our classes do not compute."""
        raise NotImplementedError

    def rows(self, residual: Residual) -> list[WeightRule]:
        """Return all foreign tensors of the depth reads."""
        raise NotImplementedError

    def kept(self, config: Config) -> Config:
        """Return the fields that stay valid when the model is written back."""
        return config

    def decoder(self, tensors: dict[str, Stored], config: Any, fields: Config, source: str) -> dict[str, Stored]:
        """Return the tensors of the text decoder, dequantised, by their foreign names.

        Args:
            config, fields: of the model here, and config.json.
            source: what the user called the checkpoint.
        """
        return tensors

    def stack(self, name: str, config: Any) -> Stack | None:
        """Return the foreign tensors that make up the parameter `name`; None if it is a single one."""
        return None

    def ours(self, name: str, config: Any) -> str:
        """Return our name of one of the other weights, or of the parameter that it is a part of, in a model of this
        config."""
        for theirs, ours in self.renamed:
            name = name.replace(theirs, ours)
        return name

    def theirs(self, name: str, config: Any) -> str:
        """Return the foreign name of one of the other weights of a model of this config; of a `Stack` the first."""
        for theirs, ours in self.renamed:
            name = name.replace(ours, theirs)
        return name


class WrittenFormat(Format):
    """A format in which our models can be written too."""

    def written(self, tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        """Return the tensors, by their foreign names, as their files hold them."""
        return tensors

    def write(self, config: Any, residual: Residual, stored: Config) -> Config:
        """Return our model's config in this format.

        Args:
            config, residual: of the model.
            stored: the config that it was loaded from, or {}.

        Raises:
            UserError: the format cannot express it.
        """
        raise NotImplementedError


def cannot(kind: Format, reason: str) -> UserError:
    """Return an error for a model that this format cannot express."""
    return UserError(f"'{kind.name}' cannot hold this model: {reason}")


def check_supported(name: str, config: Config, fields: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise UserError for a field with a value that no class of this package computes."""
    for field, supported in fields.items():
        value = config.get(field)
        if value is not None and value not in supported:
            expected = " or ".join(repr(v) for v in supported) or "none"
            raise UserError(f"{name} has {field}={value!r}, which is computed by no class here: expected {expected}")


def need(kind: Format, config: Config, *fields: str) -> None:
    """Raise UserError for a missing field."""
    for field in fields:
        if config.get(field) is None:
            raise UserError(f"config.json has no '{field}', which a '{kind.name}' checkpoint needs: copy it again")


def plain_reads(kind: Format, residual: Any) -> None:
    """Refuse a residual whose reads are not the paper's, without settings: UserError."""
    if residual.name not in ("block", "full"):
        raise cannot(kind, f"its residual is '{residual.name}', expected 'block' or 'full'")
    special = residual.special or ("window" if residual.window else None)
    special = special or (None if residual.weighting.read_temperature == 1.0 else "read_temperature")
    if residual.name == "block":
        special = special or residual.altered or ("summaries=split" if residual.kinds > 1 else None)
    if special is not None:
        raise cannot(kind, f"its reads are not the paper's ({special})")
    if residual.read_scale != "mean":
        raise cannot(
            kind,
            "its reads are sums (read_scale 'sum', as of every exact conversion), and theirs are means: train one with "
            "read_scale=mean",
        )


def one_block_size(kind: Format, residual: Any) -> int:
    """Return the sublayers in each block but the last, which may be shorter; 1 of Full."""
    sizes = residual.block_sizes if residual.name == "block" else [1]
    if len({*sizes[:-1], max(sizes)}) > 1:
        raise cannot(kind, f"its blocks differ in size ({'+'.join(map(str, sizes))})")
    return sizes[0]


def same_eps(kind: Format, residual: Any, eps: float) -> None:
    """Raise UserError if the eps of the key norms is not that of the other norms."""
    if residual.key_norm_eps != eps:
        raise cannot(kind, f"key_norm_eps is {residual.key_norm_eps}, and theirs is that of the other norms, {eps}")


def plain_config(config: Any) -> Config:
    """Return the plain config of the model's family, without the fields that this package adds."""
    key = config.model_type.removeprefix("attnres_")
    classes: Any = CLASSES[key]
    base, model = classes[0].__bases__[1], classes[1].plain_class
    fields = config.to_dict()
    our_fields = (*FIELDS, "residual_family", "foreign_config", "auto_map", "_name_or_path")
    kept = {name: value for name, value in fields.items() if name not in our_fields}
    return {**kept, "model_type": base.model_type, "architectures": [model.__name__]}


def query_and_gain(starts: list[str], d: int) -> list[WeightRule]:
    """Return the rows of reads whose names start with `starts`: a projection (1, d) and a norm (d,) each."""
    rows = []
    for index, start in enumerate(starts):
        rows += [
            WeightRule("query", index, f"{start}proj.weight", (1, d)),
            WeightRule("gain", index, f"{start}norm.weight", (d,)),
        ]
    return rows
