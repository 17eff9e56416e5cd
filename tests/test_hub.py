"""Names on the hub, and what is fetched from there."""

import huggingface_hub
import pytest

from attnres import UserError
from attnres.hub import fetch, is_hub_name


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B", "a/b.c_d-e"])
def test_names(name):
    assert is_hub_name(name)


@pytest.mark.parametrize("name", ["", "./gpt2", "a/b/c", "~/model", "C:\\model", "a b", "/model"])
def test_what_is_no_name(name):
    assert not is_hub_name(name)


def test_what_keeps_a_model_from_being_fetched_is_one_sentence(monkeypatch, tmp_path):
    def fail(*_, **__):
        raise ConnectionError("no route.\nmore words")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: str(tmp_path))
    assert fetch("some/model", ["*.json"]) == tmp_path
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=r"'some/model' is no folder here and cannot be fetched .* \(no route\)"):
        fetch("some/model", ["*.json"])
