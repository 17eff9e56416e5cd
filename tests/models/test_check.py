"""Every mechanism there is passes the conformance suite, and what only a model shows is caught."""

import pytest
import torch
from sample_mechanisms import Scaled
from torch import nn

from attnres.models.check import MODEL_CHECKS, check
from attnres.residuals import RESIDUALS, register
from attnres.residuals.check import CHECKS, outcomes
from attnres.residuals.check.subject import Subject
from attnres.residuals.mechanisms.mhc import STARTS

SETTINGS = [
    ("block", {"block_size": 3, "gate": "scalar", "null_source": True, "read_scale": "sum"}),
    ("block", {"num_blocks": 2, "gate": "vector", "recency_bias": 1.0}),
    ("full", {"group": 3, "read_scale": "sum", "read_temperature": 0.5}),
    ("cumulative", {"block_size": 2, "alpha": "learnable", "recency_bias": 3.0, "recency_bias_frozen": True}),
    ("full", {"query": "input", "window": 2}),
    ("block", {"weights": "sigmoid", "read_scale": "sum", "key_norm": False}),
    ("block", {"heads": 2, "window": 1}),
    ("block", {"block_size": 3, "block_sum": "rms"}),
    ("block", {"block_size": 3, "block_sum": "learned", "keys": "sliced:5"}),
    ("block", {"block_size": 3, "summaries": "split"}),
    ("block", {"block_size": 3, "summaries": "split", "count_power": 0.5, "count_prior": "learned"}),
    ("block", {"block_size": 3, "block_scale": True, "read_scale": "sum"}),
    ("full", {"embedding_key": "static"}),
    ("lr_attnres", {"rank": 3, "embedding_key": "static"}),
    ("review", {"gate": "scalar"}),
    ("review", {"gate": "fixed"}),
    ("multi_gate", {"num_streams": 2, "gate": "competitive"}),
    ("xhc", {"num_streams": 3, "active": 2, "fixed": 1}),
    ("full", {"layers": "1:"}),
    ("full", {"values": "normed", "read_temperature": "sqrt_width"}),
    ("post_block", {"block_size": 2}),
    ("boundary", {"block_size": 2}),
    ("boundary_normed", {"block_size": 2}),
    ("adaptive", {"least_count": 1, "gate_init": -6, "schedule": "exponential"}),
    ("hyper_connections", {"num_streams": 3, "dynamic": False}),
    ("frac_connections", {"num_slices": 2, "dynamic": False}),
    *(("mhc", {"num_streams": 2, "init": init, "single_pass": n % 2 == 1}) for n, init in enumerate(STARTS)),
    *(("mhc", {"num_streams": 2, "single_pass": single, "stream_scale": 1.0}) for single in (False, True)),
    ("mhc_lite", {"num_streams": 2}),
    ("hybrid_norm", {"prenorm_layers": 1}),
    ("rezero", {"prenorm": False}),
    ("highway", {"gate": "scalar", "gate_init": -1.0}),
    ("laurel", {"form": "rw"}),
    ("laurel", {"form": "rw+pa", "rank": 4, "previous": 2}),
    ("delta_attnres", {"block_size": 3}),
    ("delta_attnres", {"block_size": 3, "gate_start": 0.0}),
    ("muddformer", {"prepost_norm": True}),
    ("lr_attnres", {"rank": 3, "read_scale": "sum"}),
    ("ancre", {"temperature": 0.5}),
]


WHOLE = ("block", "dca", "hyper_connections", "siamese_norm")
"""Depth attention, several inputs, several streams, two residuals: they pass every check here, the others compile in
make test-all."""
NAMED = [(name, {}) for name in sorted(RESIDUALS) if name not in WHOLE]
BRANCHES = [case for case in SETTINGS if {*case[1]} & {"gate", "window", "heads", "summaries", "block_sum", "layers"}]
"""Settings that take another way through a read."""


@pytest.mark.quick("block")
@pytest.mark.parametrize("name", WHOLE)
def test_a_mechanism_passes(name):
    results = check(name)
    assert [outcome.name for outcome in results] == [*CHECKS, *MODEL_CHECKS]
    assert not [outcome for outcome in results if not outcome.passed]


@pytest.mark.quick("standard-*", "ddl-*", "rescaled-*")
@pytest.mark.parametrize(("name", "settings"), [*NAMED, *SETTINGS])
def test_the_rest_passes_all_but_compiling(name, settings):
    """With its defaults at every depth; with other settings in the deepest network."""
    subject = Subject.of(name, settings)
    all_but_compiling = {key: call for key, call in {**CHECKS, **MODEL_CHECKS}.items() if key != "compile"}
    subject = subject._replace(depths=subject.depths[-1:] if settings else subject.depths)
    assert not [outcome for outcome in outcomes(all_but_compiling, subject) if not outcome.passed]


@pytest.mark.long
@pytest.mark.parametrize(("name", "settings"), [*NAMED, *BRANCHES])
def test_the_rest_compiles(name, settings):
    subject = Subject.of(name, settings)
    assert not [outcome for outcome in outcomes({"compile": CHECKS["compile"]}, subject) if not outcome.passed]


@pytest.fixture
def failures(registered):
    def run(mechanism):
        """Register a class as "broken"; name -> detail of every check of a model that it fails."""
        mechanism.name = "broken"
        register(mechanism)
        return {o.name: o.detail for o in outcomes(MODEL_CHECKS, Subject.of("broken", {})) if not o.passed}

    return run


def test_the_mechanism_that_the_next_ones_break_is_sound(failures):
    assert not failures(type("Same", (Scaled,), {}))


def test_start_values_that_are_drawn(failures):
    class Drawn(Scaled):
        std = 1.0

        def init_parameters(self):
            nn.init.normal_(self.scale, std=self.std)

    class Broken(Drawn):
        def init_parameters(self):
            super().init_parameters()
            self.std = 0.1  # where it starts anew it is smaller

    assert not failures(Drawn)
    assert failures(Broken)["saving"].startswith("scale does not start where it should")


def test_start_values_that_overwrite_what_was_loaded(failures):
    class Broken(Scaled):
        def __init__(self, num_sublayers, width):
            self.shift = None
            super().__init__(num_sublayers, width)
            self.shift = nn.Parameter(torch.zeros(width))

        def init_parameters(self):
            self.scale.data = torch.ones_like(self.scale)  # past torch.nn.init, which spares what was loaded
            if self.shift is not None:
                nn.init.zeros_(self.shift)

    assert failures(Broken)["saving"] == "scale changes if a file lacks shift"


def test_a_tensor_that_no_file_holds(failures):
    class Broken(Scaled):
        def __init__(self, num_sublayers, width):
            super().__init__(num_sublayers, width)
            self.register_buffer("noise", torch.rand(num_sublayers + 1), persistent=False)

        def normed(self, h, index, norm, weights=None, values=()):
            return super().normed(h + h.mean(-1, keepdim=True) * self.noise[index], index, norm, weights, values)

    assert "loaded" in failures(Broken)["saving"]


def test_progress_that_no_file_holds(failures):
    class Broken(Scaled):
        done = 0.0

        def set_progress(self, fraction):
            self.done = fraction

        def normed(self, h, index, norm, weights=None, values=()):
            return super().normed(h if index else h * (1 + self.done * h), index, norm, weights, values)

    assert "loaded" in failures(Broken)["saving"]


def test_reads_that_look_at_later_tokens(failures):
    class Broken(Scaled):
        def write(self, state, index, output):
            return state + output - output.mean(-2, keepdim=True)

    assert "cached decoding changes the logits" in failures(Broken)["decoding"]


def test_a_copy_that_shares_parameters(failures):
    class Broken(Scaled):
        def __deepcopy__(self, memo):
            return self

    assert "shares parameters" in failures(Broken)["copying"]


def test_gradients_that_are_not_numbers_in_bf16(failures):
    class Broken(Scaled):
        def write(self, state, index, output):
            return state + torch.where(output > 1e6, (output - 1e6).sqrt(), output)

    assert "is not finite" in failures(Broken)["training"]
