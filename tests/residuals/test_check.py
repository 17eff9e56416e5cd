"""The conformance suite catches mechanisms that are broken, each by the check that is about it."""

from typing import NamedTuple

import pytest
import torch
from sample_mechanisms import Scaled
from torch import Tensor, nn

from attnres import UserError
from attnres.residuals import Learned, Residual, Slot, Ways, outputs, register
from attnres.residuals.check import CHECKS, outcomes
from attnres.residuals.check.subject import Subject
from attnres.residuals.mechanisms.block import Block
from attnres.residuals.mechanisms.boundary import Boundary, BoundaryNormed
from attnres.residuals.mechanisms.cumulative import Cumulative
from attnres.residuals.mechanisms.full import Full
from attnres.residuals.mechanisms.hyper_connections import HyperConnections
from attnres.residuals.mechanisms.layer_sums import DenseFormer
from attnres.residuals.mechanisms.standard import OneStream, Standard

pytestmark = pytest.mark.usefixtures("registered")


def failures(mechanism, *, compiled=False, **settings):
    """Register a class as "broken"; name -> detail of every check that it fails, compilation left out unless asked."""
    mechanism.name = "broken"
    register(mechanism)
    checks = {name: check for name, check in CHECKS.items() if compiled or name != "compile"}
    return {o.name: o.detail for o in outcomes(checks, Subject.of("broken", settings)) if not o.passed}


class Sound(Standard):
    """h_l = sum_{i<l} v_i, in a class of its own."""


def test_a_sound_mechanism_passes():
    assert not failures(type("Same", (Sound,), {"__doc__": "h_l = h_{l-1} + v."}), compiled=True)


# -- what it says of itself -------------------------------------------------------------------------------------------
def test_a_class_without_a_docstring_or_one_that_says_nothing():
    parts = vars(OneStream) | vars(Standard)
    nothing = type("Nothing", (Residual,), {name: part for name, part in parts.items() if name != "__doc__"})
    assert failures(nothing) == {"interface": "the class has no docstring"}
    nothing.__doc__ = "A residual."
    assert "neither a formula" in failures(nothing)["interface"]


def test_a_verb_that_is_missing():
    class Broken(Residual):
        """h = v."""

        traits = Standard.traits
        start, read, write, finish = Standard.start, Standard.read, Standard.write, Standard.finish

    assert failures(Broken)["interface"] == "hidden_state is not defined"


def test_settings_that_must_be_given_or_come_by_place():
    class Needs(Sound):
        """x = x."""

        def __init__(self, num_sublayers, width, *, factor):
            super().__init__(num_sublayers, width)

    class Placed(Sound):
        """x = x."""

        def __init__(self, num_sublayers, width, factor=1.0):
            super().__init__(num_sublayers, width)

    assert failures(Needs, factor=1.0) == {"settings": "setting 'factor' has no default"}
    assert "not (num_sublayers, width, *, settings)" in failures(Placed)["settings"]


def test_settings_that_fit_no_depth_are_the_users_mistake():
    with pytest.raises(UserError, match=r"fits no network of 1 to 32 sublayers: block_size is 40"):
        Subject.of("block", {"block_size": 40})
    with pytest.raises(UserError, match="did you mean 'block_size'"):
        Subject.of("block", {"blok_size": 4})
    assert Subject.of("block", {"num_blocks": 9}).depths == (9, 17, 18)


def test_the_mechanism_that_the_next_ones_break_is_sound():
    assert not failures(type("Same", (Scaled,), {"__doc__": "h = a h."}))


@pytest.mark.long
def test_parameters_that_init_parameters_forgets_or_that_are_not_fp32():
    class Forgotten(Scaled):
        """h = a h."""

        def __init__(self, num_sublayers, width):
            super().__init__(num_sublayers, width)
            nn.init.ones_(self.scale)

        def init_parameters(self):
            pass

    class Half(Scaled):
        """h = a h."""

        def __init__(self, num_sublayers, width):
            super().__init__(num_sublayers, width)
            self.scale = nn.Parameter(self.scale.bfloat16())

    class Eager(Scaled):
        """h = a h."""

        def __init__(self, num_sublayers, width):
            super().__init__(num_sublayers, width)
            self.scale = nn.Parameter(torch.ones(num_sublayers + 1, device="cpu"))

    assert failures(Forgotten) == {"start values": "init_parameters does not set scale to where it started"}
    assert "not fp32" in failures(Half)["start values"]
    assert "takes memory on the meta device" in failures(Eager)["start values"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("axes", "shape", "finding"),
    [
        (("read",), (9, 2), "has 2 dimensions and axes"),
        (("row",), (9,), "has an axis ['row']"),
        (("read",), (4,), "4 entries along 'read'"),
    ],
)
def test_learned_tables_whose_axes_are_not_those(axes, shape, finding):
    class Broken(Scaled):
        """h = a h."""

        def learned(self):
            return {"scale": Learned(torch.zeros(shape), axes, "scale")}

    assert finding in failures(Broken)["learned"]


def test_a_learned_table_with_the_name_of_another_metric():
    class Broken(Scaled):
        """h = a h."""

        def learned(self):
            return {"step": Learned(torch.zeros(self.num_sublayers), ("sublayer",), "scale")}

    assert failures(Broken)["learned"] == "'step' is the name of something else in a run's metrics"


# -- what a pass does -------------------------------------------------------------------------------------------------
def test_tokens_that_see_one_another():
    class Broken(Sound):
        """h = h."""

        def write(self, state, index, output):
            return state + output - output.mean(0, keepdim=True) / 8

    assert "gives another result" in failures(Broken)["shapes"] or "give another result" in failures(Broken)["shapes"]


def test_a_dtype_that_is_not_the_embeddings():
    class Broken(Sound):
        """h = h."""

        def finish(self, state, norm):
            return super().finish(state, norm).float()

    assert failures(Broken)["dtypes"] == "a float64 embedding gives a torch.float32 output"


@pytest.mark.long
def test_a_gradient_that_is_dropped_or_nobodys():
    class Dropped(Scaled):
        """h = a h."""

        def normed(self, h, index, norm, weights=None, values=()):
            surplus = (self.scale[index] - self.scale[index].detach()).to(h.dtype)
            return super().normed(h + h * surplus, index, norm, weights, values)

    class Unused(Sound):
        """h = h."""

        def __init__(self, num_sublayers, width):
            super().__init__(num_sublayers, width)
            self.forgotten = nn.Parameter(torch.zeros(3))

        def init_parameters(self):
            nn.init.zeros_(self.forgotten)

    assert "scale is not that of finite differences" in failures(Dropped)["gradients"]
    assert failures(Unused) == {"gradients": "forgotten has no gradient: nothing depends on it"}


@pytest.mark.long
def test_an_end_of_training_or_a_penalty_that_is_no_number():
    class Ends(Scaled):
        """h = h / (1 - p)."""

        def set_progress(self, fraction):
            with torch.no_grad():
                self.scale.div_(1 - fraction)

    class Long(Scaled):
        """h = a h."""

        def penalty(self):
            return self.scale.square()

    class Steep(Scaled):
        """h = a h."""

        def penalty(self):
            return (self.scale * 0).sum().sqrt()

    assert failures(Ends)["progress"] == "at 100% of training a result is not finite"
    assert "no finite scalar" in failures(Long)["progress"]
    assert failures(Steep)["progress"] == "at 0% of training a gradient of the penalty is not finite"


def test_a_state_that_is_changed_in_place():
    class Broken(Sound):
        """h = h."""

        def start(self, embedding):
            return embedding.clone()

        def write(self, state, index, output):
            return state.add_(output)

    assert failures(Broken)["states"] == "write changes a tensor in place that is not its own"


def test_a_state_beside_the_state():
    class Broken(Sound):
        """h = h."""

        def start(self, embedding):
            self.sum = embedding
            return embedding

        def write(self, state, index, output):
            self.sum = self.sum + output
            return self.sum

    assert "another pass in the middle" in failures(Broken)["states"]

    class Counted(NamedTuple):
        sum: Tensor
        writes: int

    class Numbered(Standard):
        """h = h."""

        def start(self, embedding):
            return Counted(embedding, 0)

        def read(self, state, index, norm):
            return self.normed(state.sum, index, norm), state

        def write(self, state, index, output):
            return Counted(state.sum + output, state.writes + 1)

        def hidden_state(self, state):
            return state.sum

        def finish(self, state, norm):
            return self.normed(state.sum, self.num_sublayers, norm)

    assert failures(Numbered)["states"] == "the state before read holds a int: expected tensors in tuples"


@pytest.mark.long
def test_a_pack_that_forgets_something():
    class Forgets(DenseFormer):
        """y = a x."""

        def pack(self, state, index):
            return super().pack(state, index)[-1:]

    class Lies(DenseFormer):
        """y = a x."""

        def slots(self, index):
            return tuple(slot._replace(name="stream", kept=True) for slot in super().slots(index)[-1:])

        def pack(self, state, index):
            return super().pack(state, index)[-1:]

    class Wide(Standard):
        """h = h."""

        def start(self, embedding):
            return torch.cat([embedding, embedding], -1)

        def read(self, state, index, norm):
            return self.normed(self.hidden_state(state), index, norm), state

        def write(self, state, index, output):
            return state + torch.cat([output, output], -1)

        def hidden_state(self, state):
            return state[..., : self.width]

        def finish(self, state, norm):
            return self.normed(self.hidden_state(state), self.num_sublayers, norm)

    assert "pack gives" in failures(Forgets)["cuts"]
    assert "cuts" in failures(Lies)
    assert "needs slots, pack and unpack of its own" in failures(Wide)["cuts"]


def test_a_slot_that_is_not_kept():
    class Broken(Sound):
        """h = h."""

        def slots(self, index):
            return (Slot("stream", True),)

    assert "kept slot 'stream' is another tensor" in failures(Broken)["cuts"]


def test_memory_that_does_not_survive_a_layer_that_runs_again():
    class Broken(Sound):
        """h = h."""

        def read(self, state, index, norm):
            self.reads = 0 if index == 0 and torch.is_grad_enabled() else getattr(self, "reads", 0) + 1
            return self.normed(state * (1 + self.reads / 100), index, norm), state

    assert "checkpointing" in failures(Broken)


def test_a_choice_by_value_breaks_the_graph():
    class Broken(Sound):
        """h = h."""

        def write(self, state, index, output):
            return state + (output if output.sum() > -1e9 else 0.0)

    assert "the compiler breaks the graph" in failures(Broken, compiled=True)["compile"]


# -- what reads mix ---------------------------------------------------------------------------------------------------
@pytest.mark.long
def test_spans_that_are_off_by_one():
    class Broken(Block):
        """b = sum v."""

        def sealed(self, index):
            embedding, *blocks = super().sealed(index)
            moved = (b._replace(span=range(b.span.start - 1, b.span.stop - 1)) for b in blocks)
            return (embedding, *moved)

    assert "is not what the layout describes" in failures(Broken, block_size=2)["sources"]


def test_sources_that_are_not_there_yet_or_share_a_name():
    class Late(Sound):
        """h = h."""

        def sources(self, index):
            return outputs(index + 2)

        def implied(self, index):
            return torch.tensor([1.0] * (index + 1) + [0.0])

    class Twins(Sound):
        """h = h."""

        def sources(self, index):
            return tuple(source._replace(kind="output", number=None) for source in super().sources(index))

    assert "outputs are there" in failures(Late)["layout"]
    assert "two sources of one name" in failures(Twins)["layout"]


class Split(Standard):
    """h = h for queries, keys and values each."""

    def ways(self, index):
        return ("query", "key", "value") if index % 2 == 0 and index < self.num_sublayers else (None,)

    def read(self, state, index, norm):
        row, ways = self.first_row(index), self.ways(index)
        parts = [self.normed(state, row + place, norm) for place in range(len(ways))]
        return (parts[0] if len(parts) == 1 else Ways(*parts)), state

    def implied(self, index):
        return torch.ones(self.places()[index][0] + 1)

    def finish(self, state, norm):
        return self.normed(state, self.first_row(self.num_sublayers), norm)


@pytest.mark.long
def test_a_sound_mechanism_of_several_reads_passes():
    assert not failures(type("Same", (Split,), {"__doc__": "h = h."}), compiled=True)


@pytest.mark.long
def test_reads_that_are_not_what_the_layout_says_they_are_for():
    class OneVector(Split):
        """h = h."""

        def read(self, state, index, norm):
            return self.normed(state, self.first_row(index), norm), state

    class TwoWays(Split):
        """h = h."""

        def ways(self, index):
            return super().ways(index)[:2]

    class NumberedAsSublayers(Split):
        """h = h."""

        def first_row(self, index):
            return index

    class OneHeadTooMany(Split):
        """h = h."""

        def layout(self):
            return (*super().layout()[:-1], *[read._replace(into="value") for read in super().layout()[-1:]])

    assert "and it gets <class 'torch.Tensor'>" in failures(OneVector)["layout"]
    assert "expected one, or query, key and value each" in failures(TwoWays)["layout"]
    assert "is shown twice" in failures(NumberedAsSublayers)["sources"]
    assert "the output has a read for a part of it" in failures(OneHeadTooMany)["layout"]


@pytest.mark.long
def test_a_layout_that_forgets_an_earlier_read():
    class Broken(Boundary):
        """x = sum a e."""

        def _since(self, start, stop):
            return super()._since(start, stop)._replace(after=None)

    assert "is not what the layout describes" in failures(Broken, block_size=2)["sources"]


def test_implied_weights_that_are_not_those_used():
    class Broken(Sound):
        """h = h."""

        def implied(self, index):
            return torch.full((index + 1,), 0.5)

    assert "is not what its mixing row makes of the outputs" in failures(Broken)["sources"]


def test_a_read_that_shows_nothing():
    class Unseen(Sound):
        """h = h."""

        def finish(self, state, norm):
            return norm(state) if callable(norm) else Standard.finish(self, state, norm)

    class Silent(Sound):
        """h = h."""

        def implied(self, index):
            return None

    assert failures(Unseen)["sources"].startswith("an observer sees reads [0")
    assert "has sources and shows no weights" in failures(Silent)["sources"]


@pytest.mark.long
def test_a_scale_that_mixing_rows_leave_out():
    class Broken(Full):
        """h = sum a v."""

        def mixing_row(self, index, weights, rows):
            return Residual.mixing_row(self, index, weights, rows)

    assert {"sources", "mixing"} <= set(failures(Broken, read_scale="sum")) and not failures(Broken)


def test_an_editor_that_is_not_asked():
    class Broken(Full):
        """h = sum a v."""

        def read(self, state, index, norm):
            editor, self.editor = self.editor, None
            x, state = super().read(state, index, norm)
            self.editor = editor
            return x, state

    assert "does not use an editor's weights" in failures(Broken)["mixing"]


@pytest.mark.quick("Standard-*", "Full-by_token-*")
@pytest.mark.parametrize(
    ("mechanism", "trait", "check"),
    [
        (Standard, "by_token", "weights"),
        (Standard, "sums_to_one", "weights"),
        (Full, "by_token", "weights"),
        (Full, "sums_to_one", "weights"),
        (HyperConnections, "by_token", "weights"),
        (Standard, "has_query", "queries"),
        (Full, "has_query", "queries"),
        (Standard, "starts_standard", "start"),
        (Cumulative, "starts_standard", "start"),
        (Full, "starts_standard", "start"),
        (BoundaryNormed, "linear", "sources"),
    ],
)
def test_traits_that_are_not_true(mechanism, trait, check):
    class Broken(mechanism):
        """h = h."""

        def __init__(self, num_sublayers, width):
            super().__init__(num_sublayers, width)
            self.traits = self.traits._replace(**{trait: not getattr(self.traits, trait)})

    assert check in failures(Broken)


@pytest.mark.parametrize("name", ["standard", "block", "cumulative"])
def test_what_starts_otherwise_by_its_values_alone_is_not_looked_at(name):
    (outcome,) = outcomes({"start": CHECKS["start"]}, Subject.of(name, {"value_residual": "layer"}))
    assert outcome.passed and "value_residual is layer" in outcome.detail


@pytest.mark.long
def test_a_logit_beyond_its_bound():
    class Broken(Full):
        """h = sum a v."""

        def sharpness(self, index):
            sharpness = super().sharpness(index)
            return sharpness and sharpness / 2

    assert failures(Broken) == {"queries": "a logit of read 1 is 2.00 times its sharpness"}


def test_an_observer_that_counts():
    class Changes(Sound):
        """h = h."""

        def normed(self, h, index, norm, weights=None, values=()):
            return super().normed(h * (1 + 1e-7 * self.watched), index, norm, weights, values)

    class Remembers(Sound):
        """h = h."""

        def start(self, embedding):
            return (embedding, embedding) if self.watched else (embedding,)

        def read(self, state, index, norm):
            return self.normed(state[0], index, norm), state

        def write(self, state, index, output):
            return (state[0] + output, *state[1:])

        def hidden_state(self, state):
            return state[0]

        def finish(self, state, norm):
            return self.normed(state[0], self.num_sublayers, norm)

    assert "an observer changes the result" in failures(Changes)["watching"]
    assert failures(Remembers) == {"watching": "an observer changes the state's tree"}


def test_what_a_mechanism_raises_is_a_check_that_failed():
    class Broken(Sound):
        """h = h."""

        def implied(self, index):
            raise RuntimeError("no weights today\nat all")

    assert failures(Broken)["sources"] == "RuntimeError: no weights today"
