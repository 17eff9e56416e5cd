"""A module of Lightning with depth reads in Lightning's own Trainer and Fabric, on a CPU."""

import pytest
import torch
from torch import nn

import attnres
from integrations import checks

lightning = pytest.importorskip("lightning", reason="make integrations installs it")
IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))


class Model(lightning.LightningModule):
    def __init__(self, post_norm=False):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 48, dropout=0.0, batch_first=True, norm_first=not post_norm)
        self.embedding = nn.Embedding(64, 32)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(32), enable_nested_tensor=False)
        self.head = nn.Linear(32, 64)

    def forward(self, ids):
        return self.head(self.encoder(self.embedding(ids)))

    def training_step(self, ids, index):
        return checks.language_loss(self(ids), ids)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2, weight_decay=0.1)
        attnres.regroup(optimizer, self)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)]


def build(**options):
    torch.manual_seed(0)
    return checks.spread(Model(**options))


def run(model):
    logits = model(IDS)
    return logits, checks.language_loss(logits, IDS)


def connect(model, residual, norms="auto", **settings):
    attnres.attach(model.encoder, residual, example=(torch.randn(2, 12, 32),), norms=norms, **settings)
    return model


ENCODER = checks.Subject(build, connect, run)
LOADER = torch.utils.data.DataLoader([IDS[0]] * 20, batch_size=2)  # Lightning resumes with the first batch of an epoch


def fit(model, folder, steps=10, path=None, **options):
    trainer = lightning.Trainer(
        max_steps=steps,
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1)],
        **options,
    )
    trainer.fit(model, LOADER, ckpt_path=path, weights_only=False)
    return trainer


def test_zero_queries_are_the_module(note):
    note("how", "`attnres.attach`, 2 lines")
    checks.zero_queries(ENCODER, note)
    checks.switches(ENCODER)

    def whole(model, residual, **settings):
        return connect(model, residual, norms=None, **settings)

    checks.zero_queries(checks.Subject(lambda: build(post_norm=True), whole, run), lambda *_: None)


def test_its_trainer(note, tmp_path):
    model = ENCODER.connected()
    note(
        "its optimizer",
        f"{checks.groups(torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1), model)}; regroup",
    )
    trainer = fit(model, tmp_path / "whole")
    assert checks.reads(model).query[1:].abs().max() > 0
    group = checks.group_of(trainer.optimizers[0], checks.reads(model).query)
    assert group["weight_decay"] == 0
    (saved,) = (tmp_path / "whole").glob("*step=5.ckpt")
    again = ENCODER.connected()
    fit(again, tmp_path / "again", path=str(saved))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    note("resume", "bit-equal")
    low = ENCODER.connected()
    fit(low, tmp_path / "low", precision="bf16-true")
    assert checks.reads(low).query.dtype == torch.float32 and checks.reads(low).query.abs().max() > 0


def test_fabric(tmp_path):
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-true")
    model = ENCODER.random_queries()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    attnres.regroup(optimizer, model)
    model, optimizer = fabric.setup(model, optimizer)
    assert checks.reads(model).query.dtype == torch.float32
    fabric.backward(checks.language_loss(model(IDS), IDS))
    optimizer.step()
    fabric.save(tmp_path / "state.ckpt", {"model": model})
    other = fabric.setup(ENCODER.connected())
    fabric.load(tmp_path / "state.ckpt", {"model": other})
    assert torch.equal(checks.reads(other).query, checks.reads(model).query)


@pytest.mark.long
def test_compile_checkpointing_and_tools(note):
    note("compile", checks.compiled(ENCODER, ENCODER.random_queries()))
    model = ENCODER.random_queries()
    note("checkpointing", checks.checkpointed(ENCODER, model, model.encoder.layers))
    note("cache", "has none")
    checks.tools(ENCODER, note)
