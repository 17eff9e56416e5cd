"""Other libraries treat a model with depth reads as they treat the plain one, and its queries as what they are."""

import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import narrow_llama
from transformers import Trainer, TrainingArguments

from attnres import attach, convert

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT's
ROWS = [{"input_ids": row, "labels": row} for row in torch.arange(48).view(4, 12) % 20]


def trainer(model, folder, **options):
    settings = TrainingArguments(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        weight_decay=0.5,
        learning_rate=1e-2,
        report_to=[],
        dataloader_pin_memory=False,
        disable_tqdm=True,
        **options,
    )
    return Trainer(model, settings, train_dataset=ROWS)


def decayed(model, made):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    (group,) = (group for group in made.create_optimizer().param_groups if group["weight_decay"])
    return {names[id(parameter)] for parameter in group["params"]}


def test_the_trainer_decays_no_query_and_no_gain(tmp_path):
    model = convert(narrow_llama(20, 0), "full")
    kept = decayed(model, trainer(model, tmp_path))
    plain = narrow_llama(20, 0)
    assert kept == decayed(plain, trainer(plain, tmp_path)) and any("q_proj" in name for name in kept)


@pytest.mark.long
def test_what_the_trainer_saves_it_resumes(tmp_path):
    first = trainer(convert(narrow_llama(20, 0), "full"), tmp_path, save_steps=1)
    first.train()
    resumed = trainer(convert(narrow_llama(20, 0), "full"), tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for one, other in zip(first.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert first.model.residual.query.abs().sum() > 0


def test_an_adapters_copy_of_the_residual_is_not_decayed_either(tmp_path):
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["residual"])
    model = get_peft_model(convert(narrow_llama(20, 0), "full"), config)
    names = decayed(model, trainer(model, tmp_path))
    assert names and not [name for name in names if "residual" in name]
    assert [name for name, p in model.named_parameters() if p.requires_grad and "residual" in name]


def test_a_module_that_was_given_reads_is_not_decayed(tmp_path):
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, norm_first=True, batch_first=True)
    module = torch.nn.TransformerEncoder(layer, 2, torch.nn.LayerNorm(16), enable_nested_tensor=False)
    attach(module, "full")
    names = trainer(module, tmp_path).get_decay_parameter_names(module)
    assert names and not [name for name in names if "residual" in name]


def test_an_adapter_that_freezes_the_reads_is_told_of():
    for options, warns in (({}, True), ({"modules_to_save": ["residual"]}, False), ({"inference_mode": True}, False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            get_peft_model(convert(narrow_llama(20, 0), "full"), LoraConfig(target_modules=["q_proj"], **options))
        assert any("modules_to_save=['residual']" in str(one.message) for one in caught) == warns
    frozen = convert(narrow_llama(20, 0), "full")
    frozen.residual.requires_grad_(False)  # on purpose
    get_peft_model(frozen, LoraConfig(target_modules=["q_proj"]))


@pytest.mark.filterwarnings("ignore:.*freezes the queries")
@pytest.mark.parametrize("kind", ["LORA", "IA3"])
def test_peft_has_default_targets(kind):
    from peft import IA3Config
    from peft.tuners.tuners_utils import BaseTunerLayer

    def targets(model):
        adapted = get_peft_model(model, {"LORA": LoraConfig, "IA3": IA3Config}[kind]())
        return [name for name, module in adapted.named_modules() if isinstance(module, BaseTunerLayer)]

    assert targets(convert(narrow_llama(20, 0))) == targets(narrow_llama(20, 0)) != []
