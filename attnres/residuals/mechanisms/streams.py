"""The common base of mechanisms with several parallel streams: state, reads, writes, and a description of the
streams."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnres.ops import Norm, Plan, compute_dtype
from attnres.ops.backend import Call, Connection, why_not_connected
from attnres.ops.dispatch import explain_connection
from attnres.ops.streams import Rewritten, connect, split, write
from attnres.residuals.base import Residual
from attnres.residuals.program import BankReads
from attnres.residuals.settings import whole
from attnres.residuals.state import Slot
from attnres.residuals.watch import NormLike, looking, watched


class Streams(NamedTuple):
    """The state. A write is computed together with the read after it, so that each stream is loaded once.

    Attributes:
        streams: (..., n, d), without the pending write.
        coefficients: a tuple of the last read's coefficients (..., C), as in `ops.streams`; empty before the first
            read.
        output: a tuple of the sublayer's output (..., d) that has to be written, or empty.
        tables: the table of each sublayer, from which its coefficients are computed.
        recomputed: how backward recomputes `streams`, or empty if it stores them.
    """

    streams: Tensor
    coefficients: tuple[Tensor, ...] = ()
    output: tuple[Tensor, ...] = ()
    tables: tuple[Tensor, ...] = ()
    recomputed: tuple[Rewritten, ...] = ()

    @property
    def written(self) -> Tensor:
        """Return the streams after the pending write."""
        return write(self.streams, *self.coefficients, *self.output) if self.output else self.streams


class ParallelStreams(Residual):
    """x = norm(p^T H),  H' = A^T H + b (outer) f(x), over n streams H (n, d).

    A subclass's `connection` says how [p, b, A] follow from each sublayer's table. All streams start as the embedding;
    the head reads their sum.
    """

    watched_from_start = True
    heeds_recompute = True
    """With `recompute_reads` the streams are stored once for as many sublayers as their square root, which takes the
    least memory, and the others are recomputed from the outputs and coefficients."""
    connection: Connection

    @property
    def has_kernels(self) -> bool:
        """Return whether a device's kernels can compute the reads."""
        call = Call((), torch.float32, streams=self.num_streams, form=self.connection)
        return bool(self.connection_tables()) and why_not_connected(call) is None

    def __init__(self, num_sublayers: int, width: int, num_streams: int) -> None:
        super().__init__(num_sublayers, width)
        self.num_streams = whole("num_streams", num_streams)
        self._weights: dict[int, Tensor] = {}

    def connection_tables(self) -> tuple[Tensor, ...]:
        """Return the table of each sublayer, (G + 1 + K, M) as in `ops.streams`; empty if a subclass computes its reads
        itself."""
        return ()

    def head(self) -> tuple[Connection, Tensor | None]:
        """Return the connection with which the head reads the streams, and its table."""
        return self.connection._replace(kind="sum"), None

    def handed_on(self, state: Streams) -> Tensor:
        return self.hidden_state(state) / self.num_streams

    def forget(self) -> None:
        self._weights = {}

    def start(self, embedding: Tensor) -> Streams:
        shape = (*embedding.shape[:-1], self.num_streams)
        self._weights = {0: embedding.new_ones(*shape, 1)} if self.watched else {}
        return Streams(embedding.unsqueeze(-2).expand(*shape, self.width), tables=self.connection_tables())

    def read(self, state: Streams, index: int, norm: NormLike) -> tuple[Tensor, Streams]:
        after = self._recomputed(state, index)
        streams, x, coefficients = self._connect(state, index, state.tables[index], self.connection, norm, after)
        assert coefficients is not None
        return x, Streams(streams, (coefficients,), (), state.tables, after)

    def _recomputed(self, state: Streams, index: int) -> tuple[Rewritten, ...]:
        """Return how backward recomputes the streams of read `index`, or nothing if it is to store them."""
        stores = not self.recompute_reads or not state.output or index % math.isqrt(self.num_sublayers) == 0
        if stores or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return ()
        source = state.recomputed[0] if state.recomputed else state.streams
        return (Rewritten(source, *state.coefficients, *state.output, self.connection),)

    def _connect(
        self,
        state: Streams,
        index: int,
        table: Tensor | None,
        form: Connection,
        norm: NormLike,
        after: tuple[Rewritten, ...] = (),
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute `connect`, and show the read to observers and editors."""
        earlier = state.coefficients[0] if state.coefficients else None
        output = state.output[0] if state.output else None
        fused = norm if isinstance(norm, Norm) and self.editor is None else None
        before, again = next(iter(state.recomputed), None), next(iter(after), None)
        streams, x, coefficients = connect(
            state.streams, table, form, earlier=earlier, output=output, norm=fused, before=before, after=again
        )
        weights = self._follow(index, form, earlier, coefficients) if self.watched else None
        if fused is None:
            return streams, self.normed(x, index, norm, weights), coefficients
        if self.watched:
            with looking(self):  # read and norm are one operation, so the read itself is recomputed to be shown
                read = connect(state.streams, table, form, earlier=earlier, output=output)[1]
                watched(self, read, index, weights)
        return streams, x, coefficients

    def _follow(self, index: int, form: Connection, earlier: Tensor | None, newest: Tensor | None) -> Tensor | None:
        """Return the weights of read `index` over outputs, (tokens, index + 1), and store the streams (..., n, outputs)
        as weights over outputs after its write. They are stored by index outside the state, so that watching changes no
        state, and a layer that runs again finds them."""
        n = self.num_streams
        with looking(self):
            outputs = self._weights[index]
            shares = earlier if form.late else newest
            if shares is None:
                dtype = compute_dtype(outputs.dtype)
                shares = outputs.new_ones(n, dtype=dtype)
                shares = torch.eye(1, n).to(shares)[0] if form.late else shares
            outputs = outputs.to(shares)
            if newest is not None and form.kind != "gate":
                _, b, carry = split(newest.to(shares), n)
                after = outputs if carry is None else carry.transpose(-1, -2) @ outputs
                self._weights[index + 1] = torch.cat([after, b.unsqueeze(-1)], -1)
            return (shares[..., None, :n] @ outputs).reshape(-1, index + 1) if self.traits.linear else None

    def write(self, state: Streams, index: int, output: Tensor) -> Streams:
        return state._replace(output=(output,))

    def hidden_state(self, state: Streams) -> Tensor:
        return state.written.sum(-2)

    def finish(self, state: Streams, norm: NormLike) -> Tensor:
        form, table = self.head()
        return self._connect(state, self.num_sublayers, table, form, norm)[1]

    def slots(self, index: int) -> tuple[Slot, ...]:
        streams = Slot(f"streams {index}", False, (self.num_streams,))
        return (streams, Slot(f"shares {index}", False)) if self.connection.late else (streams,)

    def pack(self, state: Streams, index: int) -> tuple[Tensor, ...]:
        if not self.connection.late:
            return (state.written,)
        n = self.num_streams
        first = torch.eye(1, n).to(state.streams)[0].expand(state.streams.shape[:-1])
        shares = state.coefficients[0][..., :n] if state.coefficients else first
        return state.written, torch.nn.functional.pad(shares, (0, self.width - n)).to(state.streams.dtype)

    def unpack(self, tensors: Sequence[Tensor], index: int) -> Streams:
        streams, *shares = tensors
        shares = tuple(one[..., : self.num_streams].contiguous() for one in shares)
        return Streams(streams, shares, (), self.connection_tables())

    def bank_reads(self) -> BankReads | str:
        return f"residual '{self.name}' mixes streams, not sources"

    def general_plan(self, embedding: Tensor, *, training: bool) -> Plan:
        if not self.connection_tables():
            return Plan("eager", "one pass", (f"residual '{self.name}' is made in plain torch",))
        return explain_connection(embedding, self.connection, self.num_streams)
