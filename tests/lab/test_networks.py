"""The small networks of studies that train no decoder: MLPs connected by any mechanism, and ResNets."""

import math
import shutil
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from attnres.errors import UserError
from lab.studies import resnet
from lab.studies.growth import Mlps, grow, normed
from lab.studies.memorised import ALPHAS, RATES, mixture, taught
from lab.studies.resnet import DEPTHS, Net, load_images


def values(rows, quantity):
    return [row["value"] for row in rows if row["quantity"] == quantity]


def test_a_standard_network_of_mlps_is_the_sum_written_out():
    net = Mlps("standard", 3, 8, norm=True, generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    h = x
    for first, second in zip(net.first, net.second):
        h = h + F.relu(normed(h) @ first) @ second
    with torch.no_grad():
        torch.testing.assert_close(net(x), normed(h))
    assert net.streams[-1] == pytest.approx(float(h.detach().square().mean().sqrt()), rel=1e-5)
    assert len(net.reads) == 4


def test_growth_and_its_controls():
    shape = {"layers": 24, "width": 32, "seed": 0}
    wild, tame = grow("standard", norm=False, **shape), grow("standard", norm=True, **shape)
    assert values(wild, "stream")[-1] > 15 * values(tame, "stream")[-1], "the sum without a norm explodes"
    full = grow("full", norm=True, **shape)
    assert values(full, "from_standard")[0] < 1e-9, "zero queries are the standard residual"
    assert values(grow("full", norm=True, query=1.0, **shape), "from_standard")[0] > 0.01
    assert values(tame, "from_standard") == [0.0]
    assert 0 < values(tame, "dilution")[0] < 50


def test_structure_is_easier_than_noise():
    losses = [row["value"] for row in mixture("full", norm=True, layers=1, steps=40, seed=0)]
    assert len(losses) == len(ALPHAS) and losses[-1] < losses[0] < 1.1 and all(map(math.isfinite, losses))
    rows = taught("full", layers=2, temperature=1.0, steps=4, seed=0)
    assert [row["quantity"] for row in rows] == [f"loss/{rate:g}" for rate in RATES]


@pytest.mark.parametrize("kind", ["plain", "resnet", "standard", "full"])
def test_a_resnet_has_the_published_number_of_parameters(kind):
    net = Net(kind, DEPTHS[20], 10)
    own = sum(parameter.numel() for residual in net.residuals for parameter in residual.parameters())
    count = sum(parameter.numel() for parameter in net.parameters()) - own
    assert count == pytest.approx(0.27e6, rel=0.02)
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_a_network_that_diverged_has_no_error(tmp_path, monkeypatch):
    """All of its guesses are class 0, which would be right for one in ten."""
    monkeypatch.setenv("ATTNRES_CACHE", str(tmp_path / "cache"))
    draw = np.random.default_rng(0)
    for name in ("train/a/0", "train/b/0", "test/a/0", "test/b/0"):
        path = tmp_path / "images" / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    call = {"kind": "plain", "blocks": 1, "images": str(tmp_path / "images"), "steps": 4, "seed": 0, "dtype": "fp32"}
    assert all(math.isfinite(row["value"]) for row in resnet.train(**call))
    monkeypatch.setattr(resnet, "RATE", 1e30)
    assert not any(math.isfinite(row["value"]) for row in resnet.train(**call))


def test_blocks_of_a_stage_are_connected_by_the_mechanism():
    """The standard residual's stages written out; of one block there is nothing to connect, and it is the ResNet."""
    torch.manual_seed(0)
    net = Net("standard", 3, 4).eval()
    x = torch.randn(2, 3, 8, 8)
    h = F.relu(net.stem(x))
    for first, *rest in net.stages:
        stride, width = first.first.stride[0], first.first.out_channels
        h = F.relu(F.pad(h[:, :, ::stride, ::stride], (0, 0, 0, 0, 0, width - h.shape[1])) + first(h))
        for branch in rest:
            h = h + branch(F.relu(h))
        h = F.relu(h)
    torch.testing.assert_close(net(x), net.head(h.mean((2, 3))), rtol=1e-4, atol=1e-5)
    nets = [Net(kind, 1, 4).eval() for kind in ("resnet", "full")]
    nets[1].load_state_dict(nets[0].state_dict())
    torch.testing.assert_close(nets[0](x), nets[1](x))


def test_images_come_from_a_folder_or_an_archive(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNRES_CACHE", str(tmp_path / "cache"))
    draw = np.random.default_rng(0)
    for name in ("train/b/0", "train/a/1", "test/a/0"):
        path = tmp_path / "cifar" / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(path)
    with tarfile.open(tmp_path / "cifar.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "cifar", arcname="somewhere/cifar")
    folder, packed = load_images(str(tmp_path / "cifar")), load_images(str(tmp_path / "cifar.tar.xz"))
    assert folder["train_y"].tolist() == [0, 1] and folder["test_x"].shape == (1, 3, 4, 4)
    assert all(np.array_equal(folder[name], packed[name]) for name in folder)
    for name, message in (("nothing", "there are no images in"), ("cache", "holds no images")):
        with pytest.raises(UserError, match=message):
            load_images(str(tmp_path / name))
    more = tmp_path / "cifar" / "test" / "bird" / "0.jpg"
    more.parent.mkdir()
    shutil.copy2(tmp_path / "cifar" / "test/a/0.jpg", more)
    with pytest.raises(UserError, match="test images of a class that no training image has: bird"):
        load_images(str(tmp_path / "cifar"))  # and not what the cache has of fewer images
    more.write_bytes(more.read_bytes()[:40])
    with pytest.raises(UserError, match=r"of class bird, in .* cannot be read"):
        load_images(str(tmp_path / "cifar"))
    packed = (tmp_path / "cifar.tar.xz").read_bytes()
    (tmp_path / "damaged.tar.xz").write_bytes(packed[:60] + bytes(8) + packed[68:])
    with tarfile.open(tmp_path / "whole.tar", "w") as archive:
        archive.add(tmp_path / "cifar" / "train", arcname="cifar/train")
        archive.add(tmp_path / "cifar" / "test" / "a", arcname="cifar/test/a")
        place = archive.getmember("cifar/test/a").offset
    whole = (tmp_path / "whole.tar").read_bytes()
    (tmp_path / "damaged.tar").write_bytes(whole[:place] + b"x" * 512 + whole[place + 512 :])
    for name in ("damaged.tar.xz", "damaged.tar"):
        with pytest.raises(UserError, match="is no archive of images"):
            load_images(str(tmp_path / name))
    (tmp_path / "broken.tar").write_text("no")
    with pytest.raises(UserError, match="is no archive of images"):
        load_images(str(tmp_path / "broken.tar"))
