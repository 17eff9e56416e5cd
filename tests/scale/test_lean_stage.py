"""The one file on private names of torch says which they are, and does without where they are missing."""

import logging

from torch.distributed.pipelining import PipelineStage

from attnres.scale import lean_stage


def test_every_private_name_is_there_with_its_parameters():
    assert lean_stage.missing() == []
    assert lean_stage.stage_class() is lean_stage.LeanStage


def test_another_torch_gives_its_own_stage_and_a_word(monkeypatch, caplog):
    monkeypatch.setitem(lean_stage.OVERRIDDEN, "get_fwd_recv_ops", ("microbatch",))
    monkeypatch.setitem(lean_stage.OVERRIDDEN, "_gone", ())
    with caplog.at_level(logging.WARNING, "attnres"):
        assert lean_stage.stage_class() is PipelineStage
    assert "lacks PipelineStage.get_fwd_recv_ops, PipelineStage._gone" in caplog.text
