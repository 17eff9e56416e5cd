"""The trained model that comes with the package."""

import hashlib
import re

import torch
from transformers import AutoTokenizer

import attnres
from attnres.models.model_files import EXAMPLE
from attnres.models.open import open_checkpoint

PASSAGE = (
    "The kitchen was warm, and the old woman sat by the fire with her knitting in her lap. Outside the rain fell upon "
    'the garden and the road. "You have come a long way," she said, without raising her eyes; "sit down, and tell me '
    'what has happened to your brother." The boy took off his cap and looked at the floor. He did not know how to '
    "begin. He had thought of nothing else since the morning, and yet now that he stood before her he could not find a "
    "single word."
)


def test_it_is_the_file_of_its_card() -> None:
    card = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    digest = hashlib.sha256((EXAMPLE / "model.safetensors").read_bytes()).hexdigest()
    assert digest in card and re.search(r"held-out loss \| 4\.010", card)
    assert sum(path.stat().st_size for path in EXAMPLE.iterdir()) < 2.5e6


def test_it_predicts_as_it_did_when_it_was_trained(tmp_path, monkeypatch) -> None:
    model = attnres.load("example")
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE)
    ids = tokenizer(PASSAGE, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(loss.item(), 3.1689, atol=2e-4, rtol=0)  # of the matrices in fp32: 3.1694
    sharp = [model.residual.sharpness(read) for read in range(1, 25)]
    assert max(sharp) > 1  # queries have learnt something
    assert open_checkpoint("example").tokenizer is not None


def test_a_folder_of_that_name_is_the_users(tmp_path, monkeypatch) -> None:
    model = attnres.build("pico", "full", vocab_size=50)
    model.save_pretrained(tmp_path / "example")
    monkeypatch.chdir(tmp_path)
    assert attnres.load("example").config.residual == "full"
