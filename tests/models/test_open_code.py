"""Code that a tokenizer names beside a model of a known type is not run unasked."""

import contextlib
import json
import shutil
import sys

import pytest
import torch

from attnres import UserError
from attnres.models import open_checkpoint

CODE = """
import pathlib
from transformers import PreTrainedTokenizerFast

pathlib.Path({marker!r}).touch()

class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.mark.parametrize("name", ["plain", "block"])
def test_a_tokenizers_code_is_not_run_unasked(folders, tmp_path, monkeypatch, name):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder, marker = shutil.copytree(folders[name], tmp_path / "model"), tmp_path / "ran"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": [None, f"code_{name}.Tokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / f"code_{name}.py").write_text(CODE.format(marker=str(marker)))
    checkpoint = open_checkpoint(folder)
    checkpoint.load()(input_ids=torch.arange(4)[None])
    with contextlib.suppress(UserError):  # or opened without it, where Transformers knows one for the type
        _ = checkpoint.tokenizer
    assert not marker.exists()
    assert len(open_checkpoint(folder, trust_remote_code=True).tokenizer) == 320
    assert marker.exists()
