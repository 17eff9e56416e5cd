"""What a backend is: its functions, what they take and give, and the row by which dispatch finds it.

Shapes: T tokens, n sealed sources, k open sources, S reads, d width. `eager` is the specification of each function of
depth reads, `streams` that of `connect`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from attnres.errors import UserError
from attnres.ops.norms import Norm

MAX_ONE_PASS = 32
"""Open sources of one pass, over which kernels' loops are unrolled: more are read in two phases."""

MAX_SHARED = 256
"""The most sources, and the most reads, of the Triton kernels' phase 1: those of a token are one tile."""


MAX_STREAMS = 8
"""Parallel streams of the kernels: the coefficients of a token are held in registers."""

MAX_STEPS = 64
"""Sinkhorn's steps in the kernels, whose sums are held on a stack."""

CACHED = 1 << 20
"""Bytes of sources that stay in a core's cache from one read to the next."""


def check_shapes(tensors: Sequence[Tensor | None], shape: tuple[int, ...]) -> None:
    """Raise a UserError for one of another shape: the kernels would read past its end."""
    for tensor in tensors:
        if tensor is not None and tensor.shape != shape:
            raise UserError(f"a depth read got a tensor of shape {tuple(tensor.shape)}: expected {tuple(shape)}")


class ReadInputs(NamedTuple):
    """Inputs of phase 1.

    Attributes:
        queries: (S, d), pseudo-query times key gain, in the compute dtype.
        sources: n tensors (T, d).
        eps: of the key norm.
        dtype: outputs are stored in it.
    """

    queries: Tensor
    sources: Sequence[Tensor]
    eps: float
    dtype: torch.dtype


class Sealed(NamedTuple):
    """Phase 1 of S reads over n sealed sources.

    Attributes:
        outputs: S tensors (T, d), each read's mixture of the sealed sources.
        top, total: (S, T), the largest logit and the sum of exp(logit - top). Not their log-sum-exp: rounding that
            would cost a digit where logits are of order ten.
        logits: (T, n, S). inv_rms: (T, n), 1 / sqrt(mean(v^2) + eps) of each source. Both are for the backward, and may
            be None in a bank, which has none.
    """

    outputs: list[Tensor]
    top: Tensor
    total: Tensor
    logits: Any
    inv_rms: Any


class ReadGradInputs(NamedTuple):
    """Inputs of phase 1's backward.

    Attributes:
        queries, sources, inv_rms, logits: as phase 1 had and made them.
        grads: S gradients (T, d) of its outputs. dtop: S gradients (T,) of its tops.
        carried: for each source the gradient (T, d) that it already has from later reads, or None: it is added.
    """

    queries: Tensor
    sources: Sequence[Tensor]
    inv_rms: Tensor
    logits: Tensor
    grads: Sequence[Tensor]
    dtop: Sequence[Tensor]
    carried: Sequence[Tensor | None]


class MergeInputs(NamedTuple):
    """Inputs of phase 2 and the norm after it.

    Attributes:
        opens: k tensors (T, d). added: (T, d), to be added to the last of them, or None.
        query: (d,), or None without open sources. eps: of the key norm.
        output, top, total: (T, d) and (T,) of the read's phase 1, or None without sealed sources.
        norm: that consumes the read, or None.
        dtype: the sum and the read are rounded to it.
        saves: "nothing" if no backward follows; "least" leaves out an h that this backend's backward makes again from
            what there is; "h" has it in any case, for those who watch; "h alone" has nothing else, as no backward
            follows.
    """

    opens: Sequence[Tensor]
    added: Tensor | None
    query: Tensor | None
    eps: float
    output: Tensor | None
    top: Tensor | None
    total: Tensor | None
    norm: Norm | None
    dtype: torch.dtype
    saves: Literal["nothing", "least", "h", "h alone"] = "h"


class Scalars(NamedTuple):
    """What a merge knows of each token, in the compute dtype.

    Attributes:
        rstd: (T,), 1 / the deviation of the read, if a norm follows.
        weights, scores, inv_rms: (T, k), the open sources' weights, logits and 1/rms, if k > 0.
        sealed: (T,), the weight of the sealed sources together, if there are both kinds.
    """

    rstd: Tensor | None = None
    weights: Tensor | None = None
    sealed: Tensor | None = None
    scores: Tensor | None = None
    inv_rms: Tensor | None = None


class MergeSaved(NamedTuple):
    """What the backward of a merge needs.

    Attributes:
        h: (T, d), the read before its norm; None where the backward makes it again from `output` and the open sources.
        scalars: (rows, T), the parts of `Scalars` one after another in memory: a row for rstd, k each for weights,
            scores and inv_rms, and one for sealed if there are sealed sources beside open ones.
    """

    h: Tensor | None
    scalars: Tensor | None = None

    def named(self, k: int, *, normed: bool) -> Scalars:
        """Return the parts of `scalars`, of a merge of k open sources with a norm after it or without."""
        scalars = self.scalars
        if scalars is None:
            return Scalars()
        rstd = scalars[0] if normed else None
        if not k:
            return Scalars(rstd)
        weights, scores, inv_rms = scalars[1 : 1 + 3 * k].view(3, scalars.shape[1], k)
        return Scalars(rstd, weights, scalars[-1] if len(scalars) > 1 + 3 * k else None, scores, inv_rms)


def scalar_rows(k: int, *, sealed: bool) -> int:
    """Return the rows of `MergeSaved.scalars` of a merge of k open sources, with sealed ones or without."""
    return 1 + 3 * k + (k > 0 and sealed)


class MergeGradInputs(NamedTuple):
    """Inputs of a merge's backward.

    Attributes:
        grad: (T, d), of x.
        carried: for each open source the gradient that it already has from later reads, or None: it is added.
        opens: the k sources that were scored, the last with `added` in it.
        query, norm, dtype: as the merge had them. saved: what it kept.
        output: phase 1's, where `saved` has no h.
        output_dtype, last_dtype, added_dtype: of phase 1's output, of the last open source before `added` was in it and
            of `added`: a backend may hand back gradients in them, where None says nothing.
    """

    grad: Tensor
    carried: Sequence[Tensor | None]
    opens: Sequence[Tensor]
    query: Tensor | None
    norm: Norm | None
    saved: MergeSaved
    dtype: torch.dtype | None = None
    output: Tensor | None = None
    output_dtype: torch.dtype | None = None
    last_dtype: torch.dtype | None = None
    added_dtype: torch.dtype | None = None


class MergeGrads(NamedTuple):
    """Gradients of a merge: of phase 1's output and top, of the open sources, of the query and the norm.

    That of `added` is the last open source's, but for a backend that gives it in another dtype.
    """

    output: Tensor | None
    top: Tensor | None
    opens: list[Tensor]
    query: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    added: Tensor | None = None


class Connection(NamedTuple):
    """How parallel streams are connected with a sublayer: see `streams`.

    Attributes:
        kind: of the coefficients.
        eps: of the norm before their product. read_eps: added to the shares of a read.
        steps, over_in, sinkhorn_eps: of Sinkhorn's normalisation, as `streams.sinkhorn` has them.
        late: a read has the shares that the sublayer before it chose; the first one reads stream 0.
    """

    kind: Literal["sum", "gate", "identity", "sinkhorn", "permutations", "tanh"]
    eps: float = 1e-6
    read_eps: float = 0.0
    steps: int = 20
    over_in: bool = False
    sinkhorn_eps: float = 0.0
    late: bool = False

    @property
    def number(self) -> int:
        """Of the kind, as kernels know it."""
        return ("sum", "gate", "identity", "sinkhorn", "tanh").index(self.kind)

    def columns(self, n: int) -> int:
        """Return M, the columns of the table for n streams."""
        return {"sum": 0, "gate": n, "identity": 2 * n, "sinkhorn": 2 * n + n * n, "tanh": n + 2}[self.kind]

    def groups(self, n: int) -> int:
        """Return G, how many products with the table a token has: one, or one for each stream."""
        return n if self.kind == "tanh" else 1

    def count(self, n: int) -> int:
        """Return C, the coefficients of a token."""
        return 2 * n + n * n if self.kind == "tanh" else self.columns(n)


class Connect(NamedTuple):
    """Inputs of a write of parallel streams and the read after it, as `streams.connect` takes them."""

    streams: Tensor
    earlier: Tensor | None
    output: Tensor | None
    table: Tensor | None
    norm: Norm | None
    form: Connection


class ConnectGradInputs(NamedTuple):
    """Inputs of its backward.

    Attributes:
        inputs: what it had. made: the streams after its write, None where nothing was pending or they are not read.
        coefficients: (T, C). products: (T, G, M + 1), N(H) W and 1 / rms, in the compute dtype; None without a table.
        dx, dmade, dcoefficients: gradients of its results; all but the first may be None.
    """

    inputs: Connect
    made: Tensor | None
    coefficients: Tensor | None
    products: Tensor | None
    dx: Tensor
    dmade: Tensor | None
    dcoefficients: Tensor | None


class Backend(Protocol):
    """A module that makes depth reads. It computes in at least fp32, under autocast too.

    Vectors have any shape (..., d), one for all of a call, where the records say (T, d), and so have its results.
    """

    def read_sealed(self, r: ReadInputs) -> Sealed: ...

    def read_sealed_backward(self, r: ReadGradInputs) -> tuple[Tensor, list[Tensor]]: ...

    def merge(self, m: MergeInputs) -> tuple[Tensor, MergeSaved, Tensor | None]: ...

    def merge_backward(self, m: MergeGradInputs) -> MergeGrads: ...

    def mix(self, sources: Sequence[Tensor], weights: Tensor, dtype: torch.dtype) -> Tensor: ...


class ConnectingBackend(Backend, Protocol):
    """A backend that connects parallel streams too; where it does not, plain torch does."""

    def connect(self, c: Connect) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]: ...

    def connect_backward(self, c: ConnectGradInputs) -> tuple[Tensor | None, ...]: ...


class Call(NamedTuple):
    """What a backend is asked about before it is chosen.

    Attributes:
        tensors: (..., d), sources of phase 1 or all vectors of a merge.
        compute: the dtype of the arithmetic. outputs: the dtypes of the vectors that are made.
        reads: of phase 1. opens: how many of the tensors are a merge's open sources.
        streams: how many there are, and `form`, where they are parallel streams.
    """

    tensors: Sequence[Tensor]
    compute: torch.dtype
    outputs: Sequence[torch.dtype] = ()
    reads: int = 1
    opens: int = 0
    streams: int = 0
    form: Connection | None = None


class Kernels(NamedTuple):
    """A row of `devices.KERNELS`: the kernels of one device, and what else depends on that device.

    Attributes:
        device: its type.
        bank: the class of `bank.Bank` that has the sources of a pass without gradients; None for none.
        name: as `Plan.backend` has it. title: in a sentence. found: why they are taken where they can be.
        load: returns the backend, or why it cannot be had.
        why_not: returns why the backend cannot take a call, or None.
        turned_off: whether the user wanted none, so that nobody is told of the fallback.
        narrow: under bf16 autocast finished sources, and what is made of them for the next product, are stored in bf16.
        cached: phase 1's outputs stay in a cache and are stored in the compute dtype; else in their sources'.
        few_compiled: by phase, the values of a source up to which a compiler is given torch operations; of larger ones
            our operators make faster reads and keep less for backward.
        most_open: open sources of a merge up to which it is; None for any number.
        host: its tensors are in the process's memory and computed by its threads.
        devices: returns those of the type that are here. missing: returns why there are none, None where there is one.
        visible: the environment variable that names the devices which a process sees.
        bf16: whether a device computes in bf16 natively; elsewhere bf16 is slower than fp32.
        unrounded: dtypes to which plain torch does not round a read before its norm (`is_read_rounded`).
        whole_scores: the longest sequence for which attention is faster with whole score matrices than fused.
        version: of the build, which decides the last bits. switched: gives a context with or without the kernels.
        torch_norm: PyTorch's own RMSNorm, forward and backward, is one kernel of the device and less work for the host
            than a call of ours: it makes norms that no read is fused with. Where the normed vector is rounded to a
            narrower dtype, that is one more pass: so only of at most so many values, for which the host takes longer.
        traced: the backend is made of torch operations and launches that a compiler's graph can hold.
    """

    device: str
    name: str
    title: str
    found: str
    load: Callable[[], Backend | str]
    why_not: Callable[[Call], str | None]
    turned_off: Callable[[], bool] = lambda: False
    narrow: bool = False
    cached: bool = False
    few_compiled: dict[int, int] = {}  # noqa: RUF012
    most_open: int | None = None
    torch_norm: int = 0
    traced: bool = False
    bank: Any = None
    host: bool = False
    devices: Callable[[], list[torch.device]] = list
    missing: Callable[[], str | None] = lambda: None
    visible: str = ""
    bf16: Callable[[torch.device], bool] = lambda _: False
    unrounded: frozenset[torch.dtype] = frozenset()
    whole_scores: int = 0
    version: Callable[[], str | None] = lambda: None
    switched: Callable[[bool], AbstractContextManager[Any]] = lambda _: nullcontext()


KERNELS: dict[str, Kernels] = {}
"""The kernels of each type of device, as `devices` has registered them."""


def why_not_connected(call: Call) -> str | None:
    """Return why no backend's kernel connects such parallel streams, None for a depth read or where one does."""
    form = call.form
    if form is None:
        return None
    if form.kind == "permutations":
        return "no kernel weighs permutations"
    if call.streams > MAX_STREAMS:
        return f"{call.streams} streams are more than {MAX_STREAMS}"
    return f"{form.steps} steps of Sinkhorn are more than {MAX_STEPS}" if form.steps > MAX_STEPS else None


def is_read_rounded(like: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a read is rounded to `dtype` before its norm, and kept so for backward."""
    kernels = KERNELS.get(like.device.type)
    return kernels is None or dtype not in kernels.unrounded


def vectors_moved(sealed: int, reads: int, *, training: bool) -> tuple[int, int]:
    """Vectors of width d moved per token for the sealed part of `reads` reads: (in one pass each, in two phases).

    Forward, one pass reads n sources a read; two phases read n, and write and read an output for each read. The
    backward of a pass reads n sources and their gradients so far and writes n gradients; phase 1 does so once for all
    reads, reads the sources once more for the queries, and the outputs' gradients are written and read. The open
    sources cost the same either way.
    """
    n = sealed
    one, two = n * reads, n + 2 * reads
    return (one + 3 * n * reads, two + 4 * n + 2 * reads) if training else (one, two)


def in_two_phases(sealed: int, reads: int, *, training: bool, opens: int = 1, nbytes: int | None = None) -> bool:
    """Return whether `reads` reads over `sealed` sources (and up to `opens` open ones) are better made in two phases.

    `nbytes` are those of the sealed sources, where a kernel takes any number of them: what is in a cache is not moved.
    """
    one, two = vectors_moved(sealed, reads, training=training)
    if nbytes is not None:
        return two < one and nbytes > CACHED
    return sealed > 0 and (two < one or sealed + opens > MAX_ONE_PASS)
