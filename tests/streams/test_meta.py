"""Starts on the meta device: passes for shapes alone, then values, or a refusal."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attnres import DepthReads, UserError, attach, load_plain

X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))


def encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, norm_first=True, batch_first=True)
    return nn.TransformerEncoder(layer, 3, nn.LayerNorm(32), enable_nested_tensor=False)


@pytest.mark.parametrize("how", ["reset_parameters", "load_state_dict", "load_plain"])
def test_queries_that_were_made_on_meta_are_given_values_or_refused(how):
    with torch.device("meta"):
        module = encoder()
        attach(module, "block", example=X.to("meta"), num_blocks=3)
    module, plain = module.to_empty(device="cpu"), encoder()
    for parameter in module.parameters():
        parameter.data.fill_(torch.nan)  # what memory held
    with pytest.raises(UserError, match="reset_parameters"):
        module(X)
    attached = encoder()
    attach(attached, "block", num_blocks=3)
    attached.load_state_dict(plain.state_dict(), strict=False)
    if how == "reset_parameters":
        module.load_state_dict(plain.state_dict(), strict=False)
        with pytest.raises(UserError, match="reset_parameters"):
            module(X)
        module.residual.reset_parameters()
    elif how == "load_plain":
        load_plain(module, plain.state_dict())
    else:
        module.load_state_dict(attached.state_dict())
    torch.testing.assert_close(module(X), plain(X), rtol=1e-5, atol=1e-5)
    assert type(module.residual) is type(attached.residual)


def test_an_attached_module_runs_on_the_meta_device():
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        module = encoder()
        before = module(X.to("meta")).shape
        plain = counter.get_total_flops()
        attach(module, "full", example=(X.to("meta"),))
        assert module(X.to("meta")).shape == before
        assert counter.get_total_flops() > 2 * plain


def from_meta():
    with torch.device("meta"):
        depth = DepthReads(2, 32, "full")
    depth.to_empty(device="cpu")
    for parameter in depth.parameters():
        parameter.data.fill_(torch.nan)
    return depth


def test_depth_reads_without_values_are_refused():
    depth = from_meta()
    with pytest.raises(UserError, match="reset_parameters"):
        depth.start(X).read(None)
    depth.residual.reset_parameters()
    torch.testing.assert_close(depth.start(X).read(None), X)
    assert type(depth.residual) is type(DepthReads(2, 32, "full").residual)


def test_values_that_were_set_by_hand_are_values():
    depth = from_meta()
    with torch.no_grad():
        depth.residual.query.zero_()
        with pytest.raises(UserError, match="reset_parameters"):
            depth.start(X).read(None)
        depth.residual.gain.zero_()
    torch.testing.assert_close(depth.start(X).read(None), X)
    assert depth.state_dict()["residual.query_scale"].item() == pytest.approx(0.1)
