"""Checks of a mechanism's description of its reads (layout, traits and mixing rows) against its forward pass."""

import itertools
import json
import re
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils import _pytree

from attnres.residuals.base import Residual
from attnres.residuals.check.subject import Network, Subject, close, collecting, distance, expect, tokens
from attnres.residuals.layout import Read, Source, depths, outputs, sublayer_name
from attnres.residuals.registry import make_residual
from attnres.residuals.state import State, Ways
from attnres.residuals.watch import Editor, watched_by

_CLOSE = 1e-6
"""Largest relative difference that counts as equal in fp64 here: implied weights are fp32, and norms have an eps."""
_TINY = 1e-12
"""An eps of norms so small that a sum and a mean of the same outputs give one result in fp64."""


class Recording:
    """An observer that stores what a pass showed.

    Attributes:
        reads: number of a read -> (h, weights, values). outputs: the embedding and the sublayers' outputs, (..., d).
    """

    def __init__(self) -> None:
        self.reads: dict[int, tuple[Tensor, Tensor | None, Sequence[Tensor]]] = {}
        self.outputs: list[Tensor] = []

    def on_start(self, embedding: Tensor) -> None:
        self.outputs = [embedding]

    def on_read(self, read: int, h: Tensor, weights: Tensor | None, values: Sequence[Tensor]) -> None:
        expect(read not in self.reads, f"read {read} is shown twice")
        self.reads[read] = h, weights, values

    def on_write(self, index: int, output: Tensor) -> None:
        self.outputs.append(output)


class Fixed(Editor):
    """An editor that gives reads fixed weights, whatever they mix.

    Args:
        identity: leave the weights unchanged.
    """

    def __init__(self, *, identity: bool = False) -> None:
        self.outputs: Sequence[Tensor] = ()
        self.identity = identity

    def on_start(self, embedding: Tensor) -> None:
        self.outputs = (embedding,)

    def on_write(self, index: int, output: Tensor) -> None:
        self.outputs = (*self.outputs, output)

    def edit(self, read: int, weights: Tensor) -> Tensor:
        if self.identity:
            return weights.clone()
        draw = torch.Generator().manual_seed(read)
        return torch.rand(weights.shape, generator=draw, dtype=torch.float64).to(weights)


def recorded(residual: Residual, network: Network, embedding: Tensor) -> Recording:
    """Run a pass with an observer and return the recording; every read must be shown, in order."""
    recording = Recording()
    with watched_by(residual, observer=recording):
        network.run(residual, embedding)
    expect(list(recording.reads) == list(range(len(residual.layout()))), f"an observer sees reads {[*recording.reads]}")
    return recording


def layout(subject: Subject) -> str:
    """Check that the layout has a row for each read, whose sources have unique names and are sums of outputs already
    written."""
    most = 0
    for residual, network in subject.networks():
        rows, written = residual.layout(), depths(residual.layout())
        _expect_places(residual, network, rows)
        stored = tuple(Read.from_json(json.loads(json.dumps(read.to_json()))) for read in rows)
        expect(
            stored == rows == subject.residual(network.depth, stirred=False).layout(), "it is not the same each time"
        )
        for index, read in enumerate(rows):
            at = f"read '{read.name}' of {network.depth} sublayers"
            names = [source.name for source in read.sources]
            expect(len(set(names)) == len(names), f"{at} has two sources of one name")
            opens = [source.open for source in read.sources]
            expect(opens == sorted(opens), f"{at} has a finished source after an open one")
            for source in read.sources:
                word = re.fullmatch("[a-z][a-z0-9_]{0,31}", source.kind)
                expect(word is not None, f"source kind '{source.kind}' is no word of small letters")
                span = source.span or range(0)
                late = span.step < 1 or span.start < 0 or span.stop > written[index] + 1
                outputs_there = f"and only {written[index] + 1} outputs are there"
                expect(not late, f"{at} has source '{source.name}' over {span}, {outputs_there}")
                later = source.after is not None and not 0 <= source.after < index
                expect(not later, f"{at} has source '{source.name}' after read {source.after}")
            most = max(most, len(names))
    return f"{len(rows)} reads of up to {most} sources" if most else "reads are no weighted sums"


def _expect_places(residual: Residual, network: Network, rows: Sequence[Read]) -> None:
    """Raise `Failed` unless rows belong to sublayers in order, and `read` returns inputs for them."""
    expected = [sublayer_name(index, residual.sublayers) for index in range(network.depth)]
    sublayers = list(dict.fromkeys(read.sublayer for read in rows))
    expect(sublayers == [*expected, "output"], f"rows are of {', '.join(sublayers)}, not of every sublayer in order")
    expect(rows[-1].into is None, "the output has a read for a part of it")
    state = residual("start", tokens(2, 3))
    for index in range(network.depth):
        ways = [read.into for read in rows if read.sublayer == expected[index]]
        one, several = ways == [None], set(Ways._fields) <= {*ways} and len({*ways}) == len(ways)
        expect(one or several, f"reads of {expected[index]} are for {ways}: expected one, or query, key and value each")
        x, state = residual("read", state, index, network.norm(index))
        expect(isinstance(x, Ways) == several, f"reads of {expected[index]} are for {ways}, and it gets {type(x)}")
        state = residual("write", state, index, network.sublayer(index, x))


def sources(subject: Subject) -> str:
    """Check that the values shown to observers are those of the layout, and that the mixing rows make h of them."""
    largest = 0.0
    for residual, network in subject.networks():
        rows: list[Tensor] = []
        recording, layout = recorded(residual, network, tokens(2, 3)), residual.layout()
        for index, (read, written) in enumerate(zip(layout, depths(layout))):
            if not read.sources:
                continue
            h, weights, values = recording.reads[index]
            at = f"read '{read.name}' of {network.depth} sublayers"
            expect(
                weights is not None, f"{at} has sources and shows no weights: give `implied`, or weights to `normed`"
            )
            assert weights is not None
            shape = (6, len(read.sources))
            expect(tuple(weights.shape) == shape, f"{at} shows weights {tuple(weights.shape)}, its layout says {shape}")
            one_by_one = tuple(source.span for source in read.sources) == tuple(
                source.span for source in outputs(written + 1)
            )
            expect(bool(values) or one_by_one, f"{at} shows no values, and mixes other things than the outputs so far")
            values = values or recording.outputs[: written + 1]
            expect(len(values) == shape[1], f"{at} shows {len(values)} values, its layout has {shape[1]} sources")
            if not residual.traits.linear:
                continue
            for source, value in zip(read.sources, values):
                described = _described(source, recording, index)
                what = f"source '{source.name}' of {at} is not what the layout describes"
                largest = max(largest, close(value, described, what, _CLOSE))
            row = residual.mixing_row(index, weights, rows)
            expect(row is not None, f"traits say linear, and {at} has no mixing row")
            assert row is not None
            expect(row.shape[-1] == network.depth + 1, f"the mixing row of {at} has {row.shape[-1]} columns")
            rows.append(row.expand(6, -1))
            mixed = torch.einsum("ti,itd->td", row.expand(6, -1), _flat(recording.outputs, network.depth + 1))
            what = f"{at} is not what its mixing row makes of the outputs"
            largest = max(largest, close(h.flatten(0, -2), mixed, what, _CLOSE))
    return f"rebuilt from the outputs, {largest:.1e}" if residual.layout()[0].sources else "reads have no sources"


def _described(source: Source, recording: Recording, index: int) -> Tensor:
    total = torch.zeros_like(recording.outputs[0])
    for column in source.span or ():
        total = total + recording.outputs[column]
    return total if source.after is None else total + recording.reads[source.after][0]


def _flat(values: Sequence[Tensor], count: int) -> Tensor:
    """Return (count, tokens, d): the values, with zeros for those not written yet."""
    flat = [value.flatten(0, -2) for value in values]
    return torch.stack([*flat, *[torch.zeros_like(flat[0])] * (count - len(flat))])


def weights(subject: Subject) -> str:
    """Check that rows of weights sum to one and differ by token exactly if the traits say so, and that implied weights
    are those used."""
    sums, spread = dict[bool, float](), 0.0  # rules on some layers of a deep network may be on all of a shallow one
    for residual, network in subject.networks():
        traits = residual.traits
        recording = recorded(residual, network, tokens(2, 3))
        sums.setdefault(traits.sums_to_one, 0.0)
        for index, read in enumerate(residual.layout()):
            shown = recording.reads[index][1]
            if not read.sources or shown is None:
                expect(not traits.sums_to_one, f"traits say sums_to_one, and read '{read.name}' has no weights")
                continue
            error = (shown.sum(-1) - 1.0).abs().max().item()
            sums[traits.sums_to_one] = max(sums[traits.sums_to_one], error)
            spread = max(spread, (shown - shown[:1]).abs().max().item())
            implied = residual.implied(index)
            at = f"of read '{read.name}' of {network.depth} sublayers"
            if implied is not None:
                expect(not traits.by_token, f"implied gives weights {at}, and traits say by_token")
                close(shown, implied.to(shown).expand_as(shown), f"the weights {at} are not those implied", _CLOSE)
    if not all(read.sources for read in residual.layout()):
        sums.pop(False, None)  # reads without weights have no sum
    for claim, error in sums.items():
        expect(claim == (error < _CLOSE), f"traits say sums_to_one={claim}: rows differ from one by {error:.1e}")
    by_token = traits.by_token
    expect(by_token == (spread > _CLOSE), f"traits say by_token={by_token}: tokens differ by {spread:.1e}")
    one = "sum to one" if traits.sums_to_one else "need not sum to one"
    return f"{one}, {'differ from token to token' if by_token else 'the same for every token'}"


def mixing(subject: Subject) -> str:
    """Check that, with weights held fixed by an editor, the derivative of h_l by output i is entry i of row l of the
    mixing matrix, and that the traits say linear exactly if there is such a matrix."""
    largest = 0.0
    for residual, network in subject.networks():
        traits, rows = residual.traits, list[Tensor]()
        leaves = [tokens(4, seed=10 + i).requires_grad_() for i in range(network.depth + 1)]
        layout = residual.layout()
        if not all(read.sources for read in layout):
            expect(not traits.linear, "traits say linear, and some reads have no sources")
            continue
        pinned = Network(network.depth, outputs=leaves[1:])
        recording = Recording()
        with watched_by(residual, observer=recording, editor=Fixed()):
            pinned.run(residual, leaves[0])
        for index, read in enumerate(layout):
            h, weights, _ = recording.reads[index]
            assert weights is not None
            edited = Fixed().edit(index, weights)
            close(weights, edited, f"read '{read.name}' does not use an editor's weights", _CLOSE)
            row = residual.mixing_row(index, edited, rows)
            expect(
                (row is not None) == traits.linear, f"traits say linear={traits.linear}: mixing_row gives {row!r:.20}"
            )
            if row is None:
                continue
            rows.append(row.expand(4, -1))
            upstream = tokens(4, seed=30)
            grads = torch.autograd.grad(
                h, leaves, upstream, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for column, grad in enumerate(grads):
                what = (
                    f"dh/dv of read '{read.name}' by output {column} of {network.depth} is not its mixing row's entry"
                )
                largest = max(largest, close(grad, rows[-1][:, column : column + 1] * upstream, what, _CLOSE))
    return f"{largest:.1e}" if residual.traits.linear else "no matrix: traits say not linear"


def queries(subject: Subject) -> str:
    """Check that reads have a direction, and a sharpness that no logit exceeds, if the traits say has_query; otherwise
    neither."""
    residual, depth = subject.residual(), subject.depth
    reads = range(len(residual.layout()))
    with_query = [index for index in reads if residual.direction(index) is not None]
    if not residual.traits.has_query:
        expect(not with_query, f"traits say no query, and read {with_query[:1]} has a direction")
        return "none"
    expect(bool(with_query), "traits say has_query, and no read has a direction")
    for index in reads:
        expect(
            (residual.sharpness(index) is not None) == (index in with_query),
            f"read {index} has a direction or a sharpness, expected both or neither",
        )
    closest = 0.0
    for index in with_query:
        direction, sharpness = residual.direction(index), residual.sharpness(index)
        assert direction is not None and sharpness is not None
        expect(direction.shape == (residual.width,), f"the direction of read {index} is {tuple(direction.shape)}")
        # Sources along the query and against it, exchanged for a second token: other terms of a logit cancel.
        both = torch.tensor([[1.0], [-1.0]], dtype=torch.float64) * direction.double()
        written = [(-1) ** place * both for place in range(depth + 1)]
        pinned = Network(depth, outputs=written[1:])
        weights = recorded(residual, pinned, written[0]).reads[index][1]
        assert weights is not None
        logits = weights.clamp_min(1e-300).log()
        gaps = (logits.unsqueeze(-1) - logits.unsqueeze(-2)).diff(dim=0).abs()
        if residual.traits.sums_to_one and gaps.numel():
            share = gaps.max().item() / (4 * sharpness)
            expect(share <= 1 + 1e-6, f"a logit of read {index} is {share:.2f} times its sharpness")
            closest = max(closest, share)
    return f"{len(with_query)} reads, the largest logit {closest:.2f} of its bound"


def start(subject: Subject) -> str:
    """Check that with its start values a pre-norm network computes what the standard residual computes, exactly if the
    traits say starts_standard."""
    claim, far = None, 0.0
    for depth in subject.depths:
        residual, network = subject.residual(depth, stirred=False), Network(depth, eps=_TINY)
        if residual.value_kind != "none":
            return f"not looked at: value_residual is {residual.value_kind}, and sublayers here have no values"
        claim = residual.traits.starts_standard
        plain = make_residual("standard", depth, residual.width)
        expected = network.run(plain, tokens(2, 3))
        result = network.run(residual, tokens(2, 3))
        far = max(far, distance(result, expected))
    if claim:
        expect(far <= _CLOSE, f"traits say starts_standard, and it differs from the standard residual by {far:.1e}")
        return f"the standard residual's result, {far:.1e}"
    expect(far > _CLOSE, "traits say it does not start as the standard residual, and it does")
    return f"not the standard residual's result, {far:.1e}"


def watching(subject: Subject) -> str:
    """Check that an observer changes no value and no tree of a state, and that an editor without edits changes no
    value."""
    for residual, network in subject.networks():
        for shape, grad in itertools.product(((), (3,), (2, 3)), (True, False)):
            embedding, states, watched = tokens(*shape), list[State](), list[State]()
            with torch.set_grad_enabled(grad):
                expected = network.run(residual, embedding, collecting(states))
                with watched_by(residual, observer=Recording()):
                    result = network.run(residual, embedding, collecting(watched))
                far = distance(result, expected)
                expect(torch.equal(result, expected), f"an observer changes the result by {far:.1e}")
                expect(_trees(states) == _trees(watched), "an observer changes the state's tree")
                if all(read.sources for read in residual.layout()):
                    with watched_by(residual, editor=Fixed(identity=True)):
                        close(network.run(residual, embedding), expected, "an editor that edits nothing counts", _CLOSE)
    return "observers change nothing"


def _trees(states: Sequence[State]) -> list[tuple[_pytree.TreeSpec, list[torch.Size]]]:
    """Return the tree of each state, and the shapes of its tensors."""
    flat = [_pytree.tree_flatten(state) for state in states]
    return [(form, [leaf.shape for leaf in leaves]) for leaves, form in flat]
