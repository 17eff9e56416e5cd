"""The interface of a backend: its functions, their inputs and outputs, and the row by which dispatch finds it.

Shapes: T tokens, n sealed sources, k open sources, S reads, d width. `eager` specifies each function of depth reads,
`streams` specifies `connect`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from attnres.errors import UserError
from attnres.ops.norms import Norm

MAX_ONE_PASS = 32
"""Most open sources of one pass, because kernels' loops over them are unrolled; more sources are read in two phases."""

MOST_AGAIN = 8
"""Most open sources of a merge whose backward on a GPU recomputes h, because it holds their rows in registers
meanwhile."""

MAX_SHARED = 256
"""Most sources, and most reads, of the Triton kernels' phase 1: those of a token are one tile."""


MAX_STREAMS = 8
"""Most parallel streams of the kernels: the coefficients of a token are held in registers."""

MAX_STEPS = 64
"""Most Sinkhorn steps in the kernels, whose sums are held on a stack."""

CACHED = 1 << 20
"""Bytes of sources that stay in a core's cache between two reads."""


def check_shapes(tensors: Sequence[Tensor | None], shape: tuple[int, ...]) -> None:
    """Raise a UserError for a tensor of another shape: the kernels would read past its end."""
    for tensor in tensors:
        if tensor is not None and tensor.shape != shape:
            raise UserError(f"a depth read got a tensor of shape {tuple(tensor.shape)}: expected {tuple(shape)}")


class ReadInputs(NamedTuple):
    """Inputs of phase 1.

    Attributes:
        queries: (S, d), pseudo-query times key gain, in the compute dtype.
        sources: n tensors (T, d).
        eps: eps of the key norm.
        dtype: dtype of the stored outputs.
    """

    queries: Tensor
    sources: Sequence[Tensor]
    eps: float
    dtype: torch.dtype


class Sealed(NamedTuple):
    """Results of phase 1 of S reads over n sealed sources.

    Attributes:
        outputs: S tensors (T, d), each read's mixture of the sealed sources.
        top, total: (S, T), the largest logit and the sum of exp(logit - top). They are separate, because rounding their
            log-sum-exp would cost a digit for logits of order ten.
        logits: (T, n, S). inv_rms: (T, n), 1 / sqrt(mean(v^2) + eps) of each source. Both are for the backward; a bank
            has no backward, so there they may be None.
    """

    outputs: list[Tensor]
    top: Tensor
    total: Tensor
    logits: Any
    inv_rms: Any


class ReadGradInputs(NamedTuple):
    """Inputs of phase 1's backward.

    Attributes:
        queries, sources, inv_rms, logits: inputs and results of phase 1.
        grads: S gradients (T, d) of phase 1's outputs. dtop: S gradients (T,) of its tops.
        carried: for each source its gradient (T, d) from later reads, which is added, or None.
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
        query: (d,), or None without open sources. eps: eps of the key norm.
        output, top, total: (T, d) and (T,) of the read's phase 1, or None without sealed sources.
        norm: the norm after the read, or None.
        dtype: the sum and the read are rounded to this dtype.
        saves: the parts of `MergeSaved` to return. "nothing" if no backward follows; "least" omits h if this backend's
            backward can recompute it; "h" always has h, for observers; "h alone" has only h, if no backward follows.
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
    """Values of a merge for each token, in the compute dtype.

    Attributes:
        rstd: (T,), 1 / the standard deviation (or RMS) of the read, if a norm follows.
        weights, scores, inv_rms: (T, k), the open sources' weights, logits and 1/rms, if k > 0.
        sealed: (T,), the total weight of the sealed sources, if there are sealed and open ones.
    """

    rstd: Tensor | None = None
    weights: Tensor | None = None
    sealed: Tensor | None = None
    scores: Tensor | None = None
    inv_rms: Tensor | None = None


class MergeSaved(NamedTuple):
    """Values that the backward of a merge needs.

    Attributes:
        h: (T, d), the read before its norm; None if the backward recomputes it from `output` and the open sources.
        scalars: (rows, T), the parts of `Scalars` one after another in memory: a row for rstd, k each for weights,
            scores and inv_rms, and one for sealed if there are sealed sources beside open ones.
    """

    h: Tensor | None
    scalars: Tensor | None = None

    def named(self, k: int, *, normed: bool) -> Scalars:
        """Return the parts of `scalars` for a merge of k open sources; `normed`: a norm follows."""
        scalars = self.scalars
        if scalars is None:
            return Scalars()
        rstd = scalars[0] if normed else None
        if not k:
            return Scalars(rstd)
        weights, scores, inv_rms = scalars[1 : 1 + 3 * k].view(3, scalars.shape[1], k)
        return Scalars(rstd, weights, scalars[-1] if len(scalars) > 1 + 3 * k else None, scores, inv_rms)


def scalar_rows(k: int, *, sealed: bool) -> int:
    """Return the number of rows of `MergeSaved.scalars` for a merge of k open sources; `sealed`: there are sealed ones
    too."""
    return 1 + 3 * k + (k > 0 and sealed)


class MergeGradInputs(NamedTuple):
    """Inputs of a merge's backward.

    Attributes:
        grad: (T, d), the gradient of x.
        carried: for each open source its gradient from later reads, which is added, or None.
        opens: the k sources that were scored, the last with `added` in it.
        query, norm, dtype: inputs of the merge. saved: its `MergeSaved`.
        output: phase 1's output, if `saved` has no h.
        output_dtype, last_dtype, added_dtype: dtypes of phase 1's output, of the last open source before adding, and of
            `added`. A backend may return gradients in these dtypes; None is unknown.
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

    The gradient of `added` equals that of the last open source; a backend may return it separately in another dtype.
    """

    output: Tensor | None
    top: Tensor | None
    opens: list[Tensor]
    query: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    added: Tensor | None = None


class Connection(NamedTuple):
    """The connection of parallel streams with a sublayer: see `streams`.

    Attributes:
        kind: kind of the coefficients, a row of the table in `streams`.
        eps: eps of the norm before the product with the table. read_eps: added to the shares of a read.
        steps, over_in, sinkhorn_eps: arguments of `streams.sinkhorn`.
        late: a read uses the shares that the previous sublayer computed; the first one reads stream 0.
    """

    kind: Literal["sum", "write", "gate", "identity", "sinkhorn", "permutations", "tanh"]
    eps: float = 1e-6
    read_eps: float = 0.0
    steps: int = 20
    over_in: bool = False
    sinkhorn_eps: float = 0.0
    late: bool = False

    @property
    def number(self) -> int:
        """Return the number of the kind in the kernels."""
        numbers = {"sum": 0, "write": 0, "gate": 1, "identity": 2, "sinkhorn": 3, "tanh": 4}
        return numbers[self.kind]

    def columns(self, n: int) -> int:
        """Return M, the columns of the table for n streams."""
        columns = {"gate": n, "identity": 2 * n, "sinkhorn": 2 * n + n * n, "tanh": n + 2}
        return columns.get(self.kind, 0)

    def groups(self, n: int) -> int:
        """Return G, the number of products with the table for a token: one, or one for each stream."""
        return n if self.kind == "tanh" else 1

    def count(self, n: int) -> int:
        """Return C, the number of coefficients of a token."""
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
    """Inputs of the backward of `connect`.

    Attributes:
        inputs: the inputs of the forward. made: the streams after its write, None if no write was pending or nothing
            reads them.
        coefficients: (T, C). products: (T, G, M + 1), N(H) W and 1 / rms, in the compute dtype; None without a table.
        dx, dmade, dcoefficients: gradients of the results; the last two may be None.
    """

    inputs: Connect
    made: Tensor | None
    coefficients: Tensor | None
    products: Tensor | None
    dx: Tensor
    dmade: Tensor | None
    dcoefficients: Tensor | None


class Backend(Protocol):
    """A module that computes depth reads, in at least fp32, under autocast too.

    Where the records say (T, d), vectors and results have any shape (..., d), one for all of a call.
    """

    def read_sealed(self, r: ReadInputs) -> Sealed: ...

    def read_sealed_backward(self, r: ReadGradInputs) -> tuple[Tensor, list[Tensor]]: ...

    def merge(self, m: MergeInputs) -> tuple[Tensor, MergeSaved, Tensor | None]: ...

    def merge_backward(self, m: MergeGradInputs) -> MergeGrads: ...

    def mix(self, sources: Sequence[Tensor], weights: Tensor, dtype: torch.dtype) -> Tensor: ...


class ConnectingBackend(Backend, Protocol):
    """A backend that also connects parallel streams; without one, plain torch does."""

    def connect(self, c: Connect) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]: ...

    def connect_backward(self, c: ConnectGradInputs) -> tuple[Tensor | None, ...]: ...


class Call(NamedTuple):
    """A call, as dispatch describes it to a backend.

    Attributes:
        tensors: (..., d), sources of phase 1 or all vectors of a merge.
        compute: dtype of the arithmetic. outputs: dtypes of the resulting vectors.
        reads: number of reads of phase 1. opens: how many of the tensors are a merge's open sources.
        streams, form: for parallel streams, their number and connection.
    """

    tensors: Sequence[Tensor]
    compute: torch.dtype
    outputs: Sequence[torch.dtype] = ()
    reads: int = 1
    opens: int = 0
    streams: int = 0
    form: Connection | None = None


class Kernels(NamedTuple):
    """A row of `devices.KERNELS`: the kernels of one type of device, and other properties of it.

    Attributes:
        device: the type of device.
        bank: the subclass of `bank.Bank` for passes without gradients; None for none.
        name: value of `Plan.backend`. title: name in a sentence. found: the reason given when the kernels are used.
        load: returns the backend, or the reason why it is not available.
        why_not: returns the reason why the backend cannot take a call, or None.
        turned_off: returns whether the user turned the kernels off, so that the fallback is not logged.
        narrow: under bf16 autocast finished sources, and normed reads, are stored in bf16.
        cached: phase 1's outputs stay in a cache and are stored in the compute dtype; else in the sources' dtype.
        few_compiled: by phase, the largest number of values of a source for which a compiler is given torch operations;
            for larger sources this package's operators are faster and store less for backward.
        most_open: most open sources of a merge for which it is given them; None for any number.
        one_pass_width: the widest vectors of which one pass reads several sources well; None for any width.
        host: its tensors lie in the process's memory and are computed by its threads.
        devices: returns this machine's devices of the type. missing: returns the reason why there are none, or None.
        visible: the environment variable that selects the devices which a process sees.
        bf16: returns whether a device computes in bf16 natively; otherwise bf16 is slower than fp32.
        unrounded: dtypes to which plain torch does not round a read before its norm (`is_read_rounded`).
        whole_scores: the longest sequence for which attention is faster with whole score matrices than fused.
        version: returns the build, on which the last bits of results depend. switched: returns a context with or
            without the kernels.
        torch_norm: PyTorch's RMSNorm is one kernel forward and one backward, with less work for the host than a call of
            this package, so it computes norms that are not fused with a read. If the normed vector is rounded to a
            narrower dtype, that takes one more pass: then it is used only up to this number of values, for which the
            host is slower than the device.
        traced: the backend consists of torch operations and launches that a compiler's graph can hold.
        most_again: most open sources of a merge whose backward recomputes h from them.
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
    one_pass_width: int | None = None
    torch_norm: int = 0
    traced: bool = False
    most_again: int = 0
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
"""The kernels of each type of device; `devices` registers them."""


def why_not_connected(call: Call) -> str | None:
    """Return the reason why no backend's kernel connects such parallel streams; None for a depth read, or if one
    does."""
    form = call.form
    if form is None:
        return None
    if form.kind == "permutations":
        return "no kernel weighs permutations"
    if call.streams > MAX_STREAMS:
        return f"{call.streams} streams are more than {MAX_STREAMS}"
    return f"{form.steps} steps of Sinkhorn are more than {MAX_STEPS}" if form.steps > MAX_STEPS else None


def is_read_rounded(like: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a read is rounded to `dtype` before its norm, and stored so for backward."""
    kernels = KERNELS.get(like.device.type)
    return kernels is None or dtype not in kernels.unrounded


def vectors_moved(sealed: int, reads: int, *, training: bool) -> tuple[int, int]:
    """Return the vectors of width d moved per token for the sealed part of `reads` reads: (one pass each, two phases).

    Forward, one pass reads n sources a read; two phases read n, and write and read an output for each read. The
    backward of a pass reads n sources and their gradients so far and writes n gradients; phase 1 does so once for all
    reads, reads the sources once more for the queries, and the outputs' gradients are written and read. The open
    sources cost the same either way.
    """
    n = sealed
    one, two = n * reads, n + 2 * reads
    return (one + 3 * n * reads, two + 4 * n + 2 * reads) if training else (one, two)


def in_two_phases(sealed: int, reads: int, *, training: bool, opens: int = 1, nbytes: int | None = None) -> bool:
    """Return whether `reads` reads over `sealed` sources (and up to `opens` open ones) are better computed in two
    phases.

    `nbytes`: bytes of the sealed sources, for a kernel that takes any number of them; sources in a cache are not moved.
    """
    one, two = vectors_moved(sealed, reads, training=training)
    if nbytes is not None:
        return two < one and nbytes > CACHED
    return sealed > 0 and (two < one or sealed + opens > MAX_ONE_PASS)
