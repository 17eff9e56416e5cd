"""Several rules in one network, for some layers each, and the standard residual in the others."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from attnres.errors import UserError
from attnres.ops import compute_dtype
from attnres.residuals.base import Residual
from attnres.residuals.layout import About, Learned, Source, Traits, outputs
from attnres.residuals.settings import mean_or_sum
from attnres.residuals.state import Slot, State, Ways
from attnres.residuals.watch import NormLike, unwatched

Rule = tuple[str, str, dict[str, Any]]
"""A mechanism's name, its layers, and its settings."""


def compose(*words: str | dict[str, Any]) -> list[list[Any]]:
    """Return the setting `rules` of residual "compose" from rules and their layers, each optionally followed by
    settings.

    >>> compose("block", "0:24", {"num_blocks": 4}, "muddformer", "-2:")
    [['block', '0:24', {'num_blocks': 4}], ['muddformer', '-2:', {}]]

    Raises:
        UserError: a rule without layers, or settings that follow no layers.
    """
    rules: list[list[Any]] = []
    for word in words:
        place = len(rules[-1]) if rules else 3
        if isinstance(word, str) and place > 1:
            rules.append([word])
        elif (isinstance(word, str) and place == 1) or (isinstance(word, dict) and place == 2):
            rules[-1].append(word)
        else:
            raise UserError(f"compose is given {word!r}: expected RULE, LAYERS and perhaps SETTINGS, and so on")
    if rules and len(rules[-1]) == 1:
        raise UserError(f"compose has no layers for '{rules[-1][0]}': give each rule its layers, as '12:24'")
    return [[*rule, {}][:3] for rule in rules]


def chosen_layers(text: Any, count: int) -> list[int]:
    """Return the layer numbers, out of `count`, that a text selects: "-2:", "12:24", "::3", "5", "even" or "odd".

    >>> chosen_layers("-2:", 6), chosen_layers("odd", 6)
    ([4, 5], [1, 3, 5])

    Raises:
        UserError: another text, a missing layer, or no layer.
    """
    words = {"even": "::2", "odd": "1::2"}
    written = words.get(str(text), str(text))
    match = re.fullmatch(r"(-?\d+)|(-?\d*):(-?\d*)(?::(\d*))?", written)
    if match is None or match[4] == "0":
        raise UserError(f"layers is {text!r}: expected layers as -2:, 12:24, ::3, 5, even or odd")
    if match[1] is not None:
        first, stop, step = int(match[1]), int(match[1]) + 1 or None, 1
    else:
        first, stop, step = (int(part) if part else None for part in match.groups()[1:])
    beyond = [n for n in (first, stop) if n is not None and not -count <= n <= count]
    layers = list(range(count))[first:stop:step]
    if beyond or not layers:
        raise UserError(f"layers is {text!r}: " + (f"there are {count} layers" if beyond else "these are no layers"))
    return layers


class Part(NamedTuple):
    """Consecutive sublayers, from `first` to `stop` - 1, with their rule; None is the standard residual."""

    first: int
    stop: int
    rule: Residual | None


class Inside:
    """Shows the reads of a rule's part to observers of the whole network; `outputs` are the part's, as an editor has
    them.

    Args:
        row: number, in the whole network, of the part's first read.
    """

    def __init__(self, watcher: Any, row: int) -> None:
        self.watcher, self.row, self.outputs = watcher, row, ()

    def on_start(self, embedding: Tensor) -> None:
        self.outputs: Sequence[Tensor] = (embedding,)

    def on_write(self, index: int, output: Tensor) -> None:
        self.outputs = (*self.outputs, output)

    def on_read(self, read: int, h: Tensor, weights: Tensor | None, values: Sequence[Tensor]) -> None:
        self.watcher.on_read(self.row + read, h, weights, values or self.outputs)

    def edits(self, read: int) -> bool:
        return self.watcher.edits(self.row + read)

    def edit(self, read: int, weights: Tensor) -> Tensor:
        return self.watcher.edit(self.row + read, weights)

    def exchange(self, read: int, values: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.watcher.exchange(self.row + read, values)

    def steer(self, read: int, h: Tensor) -> Tensor:
        return self.watcher.steer(self.row + read, h)


class Compose(Residual):
    """x_{l+1} = x_l + f_l(N(x_l)), except in the layers of a rule, which follow the rule with x at their start as
    embedding.

    After its layers the stream is the rule's `Residual.handed_on`: for depth reads the plain sum of all outputs. So a
    rule that starts as the standard residual does so here, exactly.

    Args:
        rules: from `compose`, or a text such as "block=0:24+muddformer=-2:"; other layers are standard.
        read_scale: value for those rules that have this setting.

    The setting `layers` of any mechanism is a `compose` with one rule. A part's parameters are named rules.N.
    """

    name = "compose"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=True)
    about = About("in the layers of a rule that rule, else x + f(N x)", "as the rules", "as the rules, else 3", "none")
    watched_from_start = True
    heeds_recompute = True
    make: Callable[[str, int, dict[str, Any], str], Residual]
    """Makes a part's rule from name, number of sublayers, settings and read_scale; `make_residual` sets it before it
    calls the constructor."""

    def __init__(
        self,
        num_sublayers: int,
        width: int,
        *,
        rules: str | Sequence[Sequence[Any]] = "",
        read_scale: Literal["mean", "sum"] = "mean",
    ) -> None:
        super().__init__(num_sublayers, width)
        size = len(self.sublayers)
        owners = _owners(_rules(rules), -(-num_sublayers // size))
        self.rules = torch.nn.ModuleList()
        self.laid: list[Part] = []
        for layer, owner in enumerate(owners):
            if layer and owners[layer - 1] is owner:
                continue
            last = next((n for n in range(layer, len(owners)) if owners[n] is not owner), len(owners))
            first, stop = layer * size, min(last * size, num_sublayers)
            rule = None if owner is None else self.make(owner[0], stop - first, owner[2], mean_or_sum(read_scale))
            if rule is not None:
                if rule.branch_scale() != 1.0:
                    raise UserError(f"residual '{rule.name}' scales the start values of all layers: leave layers out")
                self.rules.append(rule)
            self.laid.append(Part(first, stop, rule))
        rules_laid = [part.rule for part in self.laid if part.rule is not None]
        handed = [part.rule for part in self.laid[:-1] if part.rule is not None]
        traits = [rule.traits for rule in rules_laid]
        linear = all(one.linear for one in traits) and all(rule.hands_on_sum for rule in handed)
        self.hidden = not all(read.sources for rule in rules_laid for read in rule.layout())
        """Some rule's reads have no sources: then those of standard layers say none either."""
        standard_reads = sum(part.stop - part.first for part in self.laid if part.rule is None)
        standard_reads += self.laid[-1].rule is None
        weighed = self.hidden or (linear and standard_reads > (self.laid[0].rule is None))
        self.traits = self.traits._replace(
            by_token=any(one.by_token for one in traits),
            sums_to_one=all(one.sums_to_one for one in traits) and not weighed,
            has_query=any(one.has_query for one in traits),
            starts_standard=all(one.starts_standard for one in traits),
            linear=linear,
            scales_branches=any(one.scales_branches for one in traits),
        )
        self.even_start = any(rule.even_start for rule in rules_laid)
        self.hands_on_sum = all(rule.hands_on_sum for rule in rules_laid)
        self.slow = tuple(f"rules.{n}.{name}" for n, rule in enumerate(rules_laid) for name in rule.slow)

    def init_parameters(self) -> None:
        for part in self.laid:
            if part.rule is not None:
                part.rule.init_parameters()

    def _number(self, index: int) -> int:
        """Return the number of the part that contains sublayer `index`; for L, the last."""
        return next((n for n, part in enumerate(self.laid) if index < part.stop), len(self.laid) - 1)

    def _begun(self, number: int, x: Tensor) -> State:
        """Return the state at the start of a part: empty states for earlier parts, and its own."""
        rule = self.laid[number].rule
        if rule is None:
            return ((),) * number + (x,)
        row = self.first_row(self.laid[number].first)
        for name in ("observer", "editor"):
            watcher = getattr(self, name)
            setattr(rule, name, None if watcher is None else Inside(watcher, row))
        return ((),) * number + (rule.start(x),)

    def forget(self) -> None:
        for rule in self.rules:
            assert isinstance(rule, Residual)
            rule.observer = rule.editor = None
            rule.forget()

    def start(self, embedding: Tensor) -> State:
        return self._begun(0, embedding)

    def _standard(self, x: Tensor, index: int, norm: NormLike) -> Tensor:
        weights = None
        if self.watched and self.traits.by_token and self.traits.linear:
            weights = x.new_ones(x[..., 0].numel(), index + 1, dtype=compute_dtype(x.dtype))
        return self.normed(x, self.first_row(index), norm, weights, () if self.traits.linear else [x])

    def read(self, state: State, index: int, norm: NormLike) -> tuple[Tensor | Ways, State]:
        *before, inner = state
        first, _, rule = self.laid[len(before)]
        if rule is None:
            return self._standard(inner, index, norm), state
        if rule.recompute_reads != self.recompute_reads:
            rule.recompute_reads = self.recompute_reads
        x, inner = rule("read", inner, index - first, norm)
        return x, (*before, inner)

    def write(self, state: State, index: int, output: Tensor) -> State:
        *before, inner = state
        number = len(before)
        first, stop, rule = self.laid[number]
        inner = inner + output if rule is None else rule("write", inner, index - first, output)
        if index + 1 < stop or number + 1 == len(self.laid):
            return (*before, inner)
        if rule is None:
            return self._begun(number + 1, inner)
        with unwatched(rule):
            return self._begun(number + 1, rule.handed_on(inner))

    def finish(self, state: State, norm: NormLike) -> Tensor:
        rule = self.laid[-1].rule
        return self._standard(state[-1], self.num_sublayers, norm) if rule is None else rule("finish", state[-1], norm)

    def hidden_state(self, state: State) -> Tensor:
        rule = self.laid[len(state) - 1].rule
        return state[-1] if rule is None else rule.hidden_state(state[-1])

    def set_progress(self, fraction: float) -> None:
        for rule in self.rules:
            rule("set_progress", fraction)

    def penalty(self) -> Tensor | None:
        penalties = [penalty for rule in self.rules if (penalty := rule("penalty")) is not None]
        return torch.stack(penalties).sum() if penalties else None

    def ways(self, index: int) -> tuple[str | None, ...]:
        first, _, rule = self.laid[self._number(index)]
        return (None,) if rule is None or index == self.num_sublayers else rule.ways(index - first)

    def _inside(self, row: int) -> tuple[int, int, int]:
        """Return the sublayer of read `row`, its part's number, and its number among that part's reads."""
        sublayer = self.places()[row][0]
        number = self._number(sublayer)
        return sublayer, number, row - self.first_row(self.laid[number].first)

    def sources(self, read: int) -> tuple[Source, ...]:
        sublayer, number, row = self._inside(read)
        rule = self.laid[number].rule
        if rule is not None:
            return tuple(self._outside(source, number) for source in rule.sources(row))
        if self.traits.linear:
            return outputs(sublayer + 1, self.sublayers)
        return () if self.hidden else (Source("stream", None, None, open=True),)

    def _outside(self, source: Source, number: int) -> Source:
        """Return a source of a part's read as a source in the whole network."""
        first, layer = self.laid[number].first, self.laid[number].first // len(self.sublayers)
        kind, count, span, after = source.kind, source.number, source.span, source.after
        if kind == "embedding" and first:
            kind, count = "entry", layer
        elif count is not None:
            in_layers = kind == "layer" or kind in self.sublayers
            count += layer if in_layers else first if kind == "state" else self._blocks_before(number)
        if span:
            summed = all(part.rule is None or part.rule.hands_on_sum for part in self.laid[:number])
            start = 0 if span.start == 0 else span.start + first
            span = range(start, span.stop + first, span.step) if start or not first or summed else None
        after = None if after is None else after + self.first_row(first)
        return Source(kind, count, span, source.open, after)

    def _blocks_before(self, number: int) -> int:
        """Return an upper bound on the number of sources of one kind in earlier parts; this part's numbers continue
        from it."""
        return sum(part.stop - part.first + 1 for part in self.laid[:number] if part.rule is not None)

    def implied(self, read: int) -> Tensor | None:
        sublayer, number, row = self._inside(read)
        rule = self.laid[number].rule
        if self.traits.by_token:  # some reads: each shows only the sources that it uses
            return None
        if rule is not None:
            return rule.implied(row)
        return torch.ones(sublayer + 1) if self.traits.linear else None

    def direction(self, read: int) -> Tensor | None:
        _, number, row = self._inside(read)
        rule = self.laid[number].rule
        return None if rule is None else rule.direction(row)

    def sharpness(self, read: int) -> float | None:
        _, number, row = self._inside(read)
        rule = self.laid[number].rule
        return None if rule is None else rule.sharpness(row)

    def mixing_row(self, read: int, weights: Tensor, rows: Sequence[Tensor]) -> Tensor | None:
        _, number, row = self._inside(read)
        first, stop, rule = self.laid[number]
        if rule is None or not self.traits.linear:
            return super().mixing_row(read, weights, rows)
        inside = [torch.cat([r[:, :1], r[:, first + 1 : stop + 1]], 1) for r in rows[read - row : read]]
        mixed = rule.mixing_row(row, weights, inside)
        if mixed is None:
            return None
        rest = mixed.new_zeros(len(mixed), self.num_sublayers - stop)
        return torch.cat([mixed[:, :1].expand(-1, first + 1), mixed[:, 1:], rest], 1)

    def learned(self) -> dict[str, Learned]:
        tables, reads = {}, len(self.places())
        for first, _, rule in self.laid:
            for name, table in ({} if rule is None else rule.learned()).items():
                values = table.values
                for axis, kind in enumerate(table.axes):
                    if kind in ("read", "sublayer"):
                        before = self.first_row(first) if kind == "read" else first
                        whole = reads if kind == "read" else self.num_sublayers
                        shape = list(values.shape)
                        shape[axis] = whole
                        wide = torch.full(shape, torch.nan)
                        wide.narrow(axis, before, values.shape[axis]).copy_(values)
                        values = wide
                label = name if len(self.rules) == 1 else f"{name}_{first // len(self.sublayers)}"
                tables[label] = table._replace(values=values)
        return tables

    def slots(self, index: int) -> tuple[Slot, ...]:
        number = self._number(index)
        first, _, rule = self.laid[number]
        if rule is None:
            return (Slot(f"stream {index}", False),)
        behind = f" from {first}" if first else ""
        return tuple(slot._replace(name=f"{slot.name}{behind}") for slot in rule.slots(index - first))

    def pack(self, state: State, index: int) -> tuple[Tensor, ...]:
        first, _, rule = self.laid[len(state) - 1]
        return (state[-1],) if rule is None else rule.pack(state[-1], index - first)

    def unpack(self, tensors: Sequence[Tensor], index: int) -> State:
        number = self._number(index)
        first, _, rule = self.laid[number]
        return ((),) * number + (tensors[0] if rule is None else rule.unpack(tensors, index - first),)


def _rules(rules: Any) -> list[Rule]:
    """Return setting `rules` as rules."""
    if isinstance(rules, str):
        pairs = [part.partition("=") for part in rules.split("+")] if rules else []
        rules = [(name, layers) for name, _, layers in pairs]
    try:
        return [(str(name), str(layers), dict(*settings)) for name, layers, *settings in rules]
    except (TypeError, ValueError):
        raise UserError(
            f"rules is {rules!r}: expected RULE=LAYERS+RULE=LAYERS, or what attnres.compose gives"
        ) from None


def _owners(rules: Sequence[Rule], count: int) -> list[Rule | None]:
    """Return the rule of each of `count` layers, None for the standard residual."""
    owners: list[Rule | None] = [None] * count
    for rule in rules:
        for layer in chosen_layers(rule[1], count):
            owner = owners[layer]
            if owner is not None:
                raise UserError(f"layer {layer} is given to '{owner[0]}' and to '{rule[0]}': give it to one of them")
            owners[layer] = None if rule[0] == "standard" else rule
    return owners
