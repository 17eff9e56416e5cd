"""Other heads than a language model's, and other models than decoders of text: conversion changes nothing they compute,
they load again as what they are, are recorded and learn."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, LlamaConfig, LlamaModel

from attnres import UserError, convert, load, record
from attnres.figures.write import draw_model
from attnres.inspect import Inspection, from_trace
from attnres.models.classes import CLASSES, register_stored
from attnres.models.config import AUTOS
from attnres.models.exactness import compare_logits, fixed_inputs, logits

TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ENCODER = {**TEXT, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
PICTURE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
T5 = {
    "vocab_size": 61,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
WHISPER = {
    "vocab_size": 61,
    "num_mel_bins": 8,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "d_model": 32,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_source_positions": 20,
    "max_target_positions": 20,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
SOUND = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "feat_extract_norm": "layer",
    "do_stable_layer_norm": True,
}
LLAVA = {
    "text_config": {**TEXT, "model_type": "llama"},
    "vision_config": {**PICTURE, "model_type": "clip_vision_model", "projection_dim": 32},
    "image_token_id": 5,
}
MAMBA = {
    **TEXT,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
TWO, THREE = ("attention", "mlp"), ("attention", "cross_attention", "mlp")
MODELS = {
    "LlamaModel": (TEXT, TWO),
    "LlamaForSequenceClassification": (TEXT, TWO),
    "LlamaForTokenClassification": (TEXT, TWO),
    "Qwen3ForQuestionAnswering": (TEXT, TWO),
    "FalconH1ForCausalLM": (MAMBA, TWO),  # whose buffers without parameters must be filled again when it is loaded
    "ModernBertForMaskedLM": (ENCODER, TWO),
    "ModernBertModel": (ENCODER, TWO),
    "ViTForImageClassification": (PICTURE, TWO),
    "Dinov2Model": (PICTURE, TWO),
    "SiglipVisionModel": (PICTURE, TWO),
    "T5ForConditionalGeneration": (T5, THREE),
    "T5EncoderModel": (T5, TWO),
    "WhisperForConditionalGeneration": (WHISPER, THREE),
    "Wav2Vec2ForCTC": (SOUND, TWO),
    "LlavaForConditionalGeneration": (LLAVA, TWO),
}


def make(name, fields):
    cls = getattr(transformers, name)
    known = {key: value for key, value in fields.items() if key != "num_key_value_heads" or "ModernBert" not in name}
    torch.manual_seed(0)
    return cls(cls.config_class(**known)).eval()


@pytest.mark.quick(
    "LlamaModel",
    "LlamaForSequenceClassification",
    "WhisperForConditionalGeneration",
    "ViTForImageClassification",
    "ModernBertForMaskedLM",
)
@pytest.mark.parametrize("name", MODELS)
def test_what_converts_computes_the_same_and_loads_as_what_it_is(name, tmp_path):
    fields, kinds = MODELS[name]
    model = make(name, fields)
    report = convert(model, block_size=3, out=tmp_path / "out")
    assert report.relative_difference < 3e-6
    reloaded = load(tmp_path / "out")
    assert type(reloaded).plain_class is type(model) and reloaded.residual.sublayers == kinds
    assert compare_logits(model, reloaded).relative < 3e-6
    with torch.no_grad():
        reloaded.residual.query.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
    inputs = fixed_inputs(reloaded)
    with record(reloaded) as trace:
        changed = logits(reloaded, inputs)
    assert len(trace.weights) == reloaded.residual.num_sublayers + 1
    assert not torch.allclose(changed, logits(model, inputs), atol=1e-6)
    output = reloaded(**inputs)
    getattr(output, "logits", output[0]).square().mean().backward()
    assert reloaded.residual.query.grad[1:].abs().amax(1).min() > 0


@pytest.mark.quick("WhisperForConditionalGeneration", "ViTForImageClassification", "ModernBertForMaskedLM")
@pytest.mark.parametrize("name", [name for name, (fields, _) in MODELS.items() if fields not in (TEXT, MAMBA)])
def test_figures_are_drawn_of_what_is_recorded(name, tmp_path):
    """Of encoders, of pictures, of sounds, and of layers with three sublayers."""
    fields, kinds = MODELS[name]
    model = convert(make(name, fields), block_size=3)
    with torch.no_grad():
        model.residual.query.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
    with record(model) as trace:
        logits(model, fixed_inputs(model))
    inspection = from_trace(model, trace, source="noise")
    inspection.save(tmp_path / "inspection.json")
    drawn = draw_model(Inspection.load(tmp_path / "inspection.json"))
    assert {"boundaries", "queries"} <= {plot.name for plot in drawn.plots}
    assert len(inspection.reads) == model.residual.num_sublayers + 1 and inspection.data["source"] == "noise"
    assert [read.rpartition(" ")[0] for read in inspection.reads[: len(kinds)]] == list(kinds)


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("BertForMaskedLM", {**ENCODER, "type_vocab_size": 2}, "a norm or a gate follows the addition"),
        ("Wav2Vec2ForCTC", {**SOUND, "do_stable_layer_norm": False}, "a norm or a gate follows the addition"),
        ("BartForConditionalGeneration", {**WHISPER, "max_position_embeddings": 20}, "a norm or a gate follows"),
    ],
)
def test_post_norm_is_refused(name, fields, says):
    fields = {
        key: value for key, value in fields.items() if key in getattr(transformers, name).config_class().to_dict()
    }
    with pytest.raises(UserError, match=f"{name} cannot have depth reads: .*{says}"):
        convert(make(name, fields))


def test_a_head_is_put_on_a_base_that_is_there(tmp_path):
    """A language model's folder gives a classifier, a reward model or an embedding its reads."""
    model = convert(make("LlamaForCausalLM", TEXT), "full")
    with torch.no_grad():
        model.residual.query.normal_(0, 0.3)
    model.save_pretrained(tmp_path)
    for auto in (AutoModel, AutoModelForSequenceClassification):
        reloaded = auto.from_pretrained(tmp_path)
        base = reloaded if auto is AutoModel else reloaded.model
        assert (
            torch.equal(base.residual.query, model.residual.query)
            and sum("residual" in n for n in dict(base.named_parameters())) == 2
        )
        ids = torch.arange(6).view(1, 6)
        assert torch.equal(base(input_ids=ids).last_hidden_state, model.model(input_ids=ids).last_hidden_state)


def test_a_masked_model_is_registered_as_what_it_is(tmp_path):
    model = convert(make("ModernBertForMaskedLM", ENCODER), block_size=3)
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(reloaded) is type(model)
    known = [auto.__name__ for auto in AUTOS if auto._model_mapping.get(type(model.config), None) is type(model)]
    assert known == ["AutoModelForMaskedLM"]


OPEN = """
import sys, transformers
from attnres import UserError, load
transformers.logging.set_verbosity_error()
for folder in sys.argv[1:]:
    try:
        model = load(folder)
    except UserError as error:
        print(error)
    else:
        print(type(model).__name__, model.num_parameters(), model.residual.num_sublayers)
"""


@pytest.mark.long
def test_a_head_that_no_auto_class_has_is_what_loads_in_another_process(tmp_path):
    class Own(LlamaModel):
        """A class that is nowhere to be found there."""

    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 32, "num_labels": 1}
    models = [make("GPT2DoubleHeadsModel", gpt2), make("ViTForMaskedImageModeling", {**PICTURE, "encoder_stride": 4})]
    folders = [tmp_path / "heads", tmp_path / "pictures", tmp_path / "own"]
    for model, folder in zip([*models, Own(LlamaConfig(**TEXT))], folders, strict=True):
        convert(model, "full", out=folder)
    command = [sys.executable, "-c", OPEN, *map(str, folders)]
    *loaded, refusal = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    sublayers = (4, 6)
    expected = [
        f"AttnRes{type(model).__name__} {model.num_parameters() + 2 * 32 * (count + 1)} {count}"
        for model, count in zip(models, sublayers, strict=True)
    ]
    assert loaded == expected
    assert "own is of class 'AttnResOwn', and neither Transformers nor this process has" in refusal


def with_type(folder, model_type):
    """A folder as it was written when the type of a probed family was not yet its class's."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "model_type": model_type}))
    (folder / "modeling_attnres.py").unlink()
    return folder


def test_two_families_of_one_type_are_told_apart(tmp_path):
    encoder, decoder = (make(name, T5) for name in ("T5EncoderModel", "T5ForConditionalGeneration"))
    types = [convert(model, "full", out=tmp_path / name).model_type for name, model in (("e", encoder), ("d", decoder))]
    assert types == ["attnres_t5_t5encodermodel", "attnres_t5_t5forconditionalgeneration"]
    for name, plain in (("e", encoder), ("d", decoder)):
        loaded = load(tmp_path / name)
        assert type(loaded).plain_class is type(plain) and compare_logits(plain, loaded).relative < 3e-6
        config = json.loads((tmp_path / name / "config.json").read_text())
        classes = register_stored(config, tmp_path / name)
        assert classes["AttnResT5Config"] is type(loaded.config) and classes[type(loaded).__name__] is type(loaded)


def test_folders_with_the_type_of_the_plain_model_load_one_family_a_process(tmp_path, monkeypatch):
    monkeypatch.delitem(CLASSES, "t5", raising=False)
    models = [make(name, T5) for name in ("T5EncoderModel", "T5ForConditionalGeneration")]
    folders = [tmp_path / "e", tmp_path / "d"]
    for model, folder in zip(models, folders, strict=True):
        convert(model, "full", out=folder)
        with_type(folder, "attnres_t5")
    assert compare_logits(models[0], load(folders[0])).relative < 3e-6
    with pytest.raises(
        UserError, match=r"d is of type 'attnres_t5' with the layers of T5ForConditionalGeneration, and"
    ):
        load(folders[1])
    monkeypatch.delitem(CLASSES, "t5")  # as in another process
    assert compare_logits(models[1], load(folders[1])).relative < 3e-6


def test_pictures_reach_the_text_of_a_converted_model():
    model = make("LlavaForConditionalGeneration", LLAVA)
    new = convert(model, "full")
    inputs = {
        "input_ids": torch.tensor([[1, *[5] * 16, 3, 4]]),
        "pixel_values": torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)),
    }
    torch.testing.assert_close(new(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-5)
    options = {**inputs, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(new.generate(**options), model.generate(**options))


def test_what_is_written_is_loaded_and_compared(tmp_path, monkeypatch):
    from attnres.models import export

    monkeypatch.setattr(export.DepthMixin, "is_custom_code", classmethod(lambda cls: True))
    with pytest.raises(UserError, match=r"computes something else when it is loaded again .*nothing was written"):
        convert(make("FalconH1ForCausalLM", MAMBA), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
