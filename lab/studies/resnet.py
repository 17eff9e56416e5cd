"""Plain networks, ResNets and depth attention over a stage's blocks, on CIFAR-10."""

import dataclasses
import hashlib
import io
import lzma
import math
import tarfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from attnres.errors import UserError
from attnres.files import cache_dir, lock, user_path, write_bytes
from attnres.residuals import make_residual
from attnres.residuals.state import as_it_is
from attnres.text import run_name
from lab.contrast import contrast
from lab.design import Arm, Computed, ComputedCall, Design, Measured, Setting, StudyResult


def load_images(source: str) -> dict[str, np.ndarray]:
    """Return the images of a folder or tar archive: train_x, test_x (n, 3, H, W) uint8, train_y, test_y (n,) int64.

    They are decoded once and cached. Classes are numbered in the order of their names.

    Raises:
        UserError: nothing is there, no such images, an unreadable one, images of several sizes, or test images of a
            class without training images.
    """
    path = user_path(source)
    if not path.exists():
        raise UserError(
            f"there are no images in {path}: give a folder or an archive with train/CLASS/*.jpg and test/..."
        )
    files = sorted(path.rglob("*.jpg")) if path.is_dir() else [path]
    stats = [(str(file), stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]]
    key = hashlib.sha256(f"{path.resolve()} {stats}".encode()).hexdigest()[:16]
    kept = cache_dir() / "images" / f"{key}.npz"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with lock(kept.with_suffix(".lock"), wait=True):
        if not kept.is_file():
            write_bytes(kept, _decoded(path))
    with np.load(kept, allow_pickle=False) as arrays:
        return dict(arrays)


def _decoded(path: Path) -> bytes:
    parts: dict[str, list[tuple[str, np.ndarray]]] = {"train": [], "test": []}
    for split, label, data in _files(path):
        try:
            with Image.open(io.BytesIO(data)) as image:
                parts[split].append((label, np.asarray(image.convert("RGB")).transpose(2, 0, 1)))
        except (OSError, SyntaxError) as error:
            raise UserError(
                f"image {len(parts[split]) + 1} of {split}, of class {label}, in {path} cannot be read ({error}): "
                "restore or remove it"
            ) from error
    labels = sorted({label for label, _ in parts["train"]})
    if unknown := sorted({label for label, _ in parts["test"]} - set(labels)):
        raise UserError(f"{path} has test images of a class that no training image has: {unknown[0]}")
    if not labels or not parts["test"]:
        raise UserError(f"{path} holds no images: expected train/CLASS/*.jpg and test/CLASS/*.jpg")
    if len(shapes := {image.shape for many in parts.values() for _, image in many}) > 1:
        raise UserError(f"{path} holds images of {len(shapes)} sizes: expected one size")
    arrays: dict[str, Any] = {}
    for split, many in parts.items():
        arrays[f"{split}_x"] = np.stack([image for _, image in many])
        arrays[f"{split}_y"] = np.array([labels.index(label) for label, _ in many])
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def _files(path: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield split, class and bytes of every image, ordered by name."""
    if path.is_dir():
        names = [(file.relative_to(path).as_posix(), file) for file in path.rglob("*.jpg")]
        for name, file in sorted(names):
            if part := _place(name):
                yield (*part, file.read_bytes())
        return
    try:
        with tarfile.open(path) as archive:
            files = [(member.name, archive.extractfile(member)) for member in archive if member.name.endswith(".jpg")]
            members = {name: file.read() for name, file in files if file is not None}
            stream = archive.fileobj
            stream.seek(archive.offset)
            if stream.read(tarfile.BLOCKSIZE).strip(tarfile.NUL):
                raise tarfile.ReadError("damaged after its first files")
            while stream.read(1 << 20):  # read to the end, where a compressed archive has its checksum
                pass
    except (tarfile.TarError, OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"{path} is no archive of images ({error})") from error
    for name in sorted(members):
        if part := _place(name):
            yield (*part, members[name])


def _place(name: str) -> tuple[str, str] | None:
    """Return split and class from a file's name, which may be preceded by folders."""
    parts = PurePosixPath(name).parts
    for place, part in enumerate(parts[:-2]):
        if part in ("train", "test"):
            return part, parts[place + 1]
    return None


# ------------------------------------------------------------------ study


WIDTHS = (16, 32, 64)
DEPTHS = {20: 3, 32: 5, 44: 7, 56: 9}
"""Layers -> blocks in each of three stages; layers = 6 n + 2."""
PUBLISHED = {
    "plain-20": "9.26",
    "plain-32": "10.00",
    "plain-44": "11.22",
    "plain-56": "13.58",
    "resnet-20": "8.27 to 8.64",
    "resnet-32": "7.56",
    "resnet-44": "7.62",
    "resnet-56": "6.41 to 7.47",
}
"""Test error in percent, github.com/samitmohan's repository and blog, which report the best epoch on test images."""
CAPTION = "Test error less that of the first network named, in percent of the images: left of the line is lower."
AXIS = "difference of the test error, percent"
RATE, MOMENTUM, DECAY, BATCH, STEPS = 0.1, 0.9, 1e-4, 128, 64_000
MULTIPLICATIONS = 41e6
"""Multiplications of ResNet-20 for an image of 32 x 32, forward (He et al.)."""


class Branch(nn.Module):
    """Two 3x3 convolutions with batch norm, the branch of a block."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])

    def forward(self, x: Tensor) -> Tensor:
        return self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))


class Net(nn.Module):
    """He et al.'s network for CIFAR: a convolution, three stages of n blocks, pooling, a classifier.

    Args:
        kind: plain is relu(f(x)), resnet relu(x + f(x)) with shortcut A (strided, zeros added) between stages.
            Otherwise a mechanism's name: it connects the blocks of a stage after its first, each reading the stage's
            outputs so far separately at every position, f(relu(h)); standard is then x + f(relu(x)).
    """

    def __init__(self, kind: str, blocks: int, classes: int) -> None:
        super().__init__()
        self.kind = kind
        self.stem = nn.Sequential(nn.Conv2d(3, WIDTHS[0], 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTHS[0]))
        before = (WIDTHS[0], *WIDTHS[:-1])
        self.stages = nn.ModuleList(
            nn.ModuleList(
                Branch(first if place == 0 else width, width, 2 if place == 0 and stage else 1)
                for place in range(blocks)
            )
            for stage, (first, width) in enumerate(zip(before, WIDTHS, strict=True))
        )
        connected = blocks > 1 and kind not in ("plain", "resnet")
        self.residuals = nn.ModuleList(make_residual(kind, blocks - 1, width) for width in WIDTHS if connected)
        self.head = nn.Linear(WIDTHS[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 3, H, W) -> logits (batch, classes)."""
        x = F.relu(self.stem(x))
        for stage, blocks in enumerate(self.stages):
            branches = cast(list[Branch], blocks)
            if self.kind in ("plain", "resnet"):
                for branch in branches:
                    x = F.relu(branch(x) if self.kind == "plain" else shortcut(x, branch) + branch(x))
                continue
            x = F.relu(shortcut(x, branches[0]) + branches[0](x))
            if len(branches) > 1:
                x = self._connected(self.residuals[stage], branches, x)
        return self.head(x.mean((2, 3)))

    def _connected(self, residual: nn.Module, branches: list[Branch], x: Tensor) -> Tensor:
        state = residual("start", channels_last(x))
        for index in range(len(branches) - 1):
            read, state = residual("read", state, index, as_it_is)
            state = residual("write", state, index, channels_last(branches[index + 1](F.relu(channels_first(read)))))
        return F.relu(channels_first(residual("finish", state, as_it_is)))


def channels_last(x: Tensor) -> Tensor:
    """Return x with channels last, as a stream has them."""
    return x.movedim(1, -1).contiguous()


def channels_first(x: Tensor) -> Tensor:
    """Return x with channels first, as a convolution has them."""
    return x.movedim(-1, 1)


def shortcut(x: Tensor, branch: Branch) -> Tensor:
    """Return shortcut A of x: every second pixel, new channels zero; unchanged if the branch keeps the shape."""
    stride, width = branch.first.stride[0], branch.first.out_channels
    x = x[:, :, ::stride, ::stride]
    return F.pad(x, (0, 0, 0, 0, 0, width - x.shape[1]))


def train(kind: str, blocks: int, images: str, steps: int, seed: int, dtype: str) -> list[dict[str, Any]]:
    """Train one network by the published recipe, its schedule scaled to `steps`, under autocast if `dtype` is not fp32;
    return rows `error` (percent of test images, only at the end, so nothing is selected on them) and `train_loss` (of
    the last hundredth of training)."""
    data = load_images(images)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    net = Net(kind, blocks, int(data["train_y"].max()) + 1).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
    train_x, test_x = (torch.from_numpy(data[f"{split}_x"]).float() / 255 for split in ("train", "test"))
    mean, spread = train_x.mean((0, 2, 3), keepdim=True), train_x.std((0, 2, 3), keepdim=True)
    train_x, test_x = (train_x - mean) / spread, (test_x - mean) / spread
    draw = np.random.default_rng(seed)
    precision = partial(torch.autocast, device.type, torch.bfloat16, enabled=dtype == "bf16")
    losses = []
    for step in range(steps):
        warm = min(1.0, (step + 1) / max(1.0, 0.01 * steps))  # the published warm-up for deep networks, used for all
        rate = RATE * warm * (1.0 if step < steps // 2 else 0.1 if step < 3 * steps // 4 else 0.01)
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = torch.from_numpy(draw.choice(len(train_x), min(BATCH, len(train_x)), replace=False))
        x = _augmented(train_x[rows], draw).to(device, memory_format=torch.channels_last)
        with precision():
            loss = F.cross_entropy(net(x), torch.from_numpy(data["train_y"])[rows].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    net.eval()
    with torch.no_grad(), precision():
        guesses = torch.cat([net(part.to(device)).argmax(1).cpu() for part in test_x.split(500)])
    end = losses[-max(1, steps // 100) :]
    # A diverged network always predicts class 0, which is no result.
    wrong = (guesses.numpy() != data["test_y"]).mean() if all(map(math.isfinite, end)) else math.nan
    return [
        {"quantity": "error", "step": steps, "value": 100 * float(wrong)},
        {"quantity": "train_loss", "step": steps, "value": sum(end) / len(end)},
    ]


def _augmented(x: Tensor, draw: np.random.Generator) -> Tensor:
    """Return images padded by four, cropped at random and flipped at random, image by image."""
    size = x.shape[-1]
    padded = F.pad(x, (4, 4, 4, 4))
    corners, flips = draw.integers(0, 9, (len(x), 2)), draw.random(len(x)) < 0.5
    crops = [image[:, top : top + size, left : left + size] for image, (top, left) in zip(padded, corners)]
    return torch.stack([crop.flip(-1) if flip else crop for crop, flip in zip(crops, flips)])


def _named(label: str) -> tuple[str, int]:
    kind, _, layers = label.rpartition("-")
    return kind, int(layers)


def arms(setting: Setting, measured: Measured) -> list[Arm]:
    """Request each kind at each depth; nothing without images."""
    if setting.images is None:
        return []
    small = setting.preset.small
    depths = list(DEPTHS)[:1] if small < 0.01 else list(DEPTHS)[:2] if small < 1 else list(DEPTHS)
    kinds = ("plain", "resnet", "standard", "full") if small >= 0.01 else ("plain", "full")
    steps = max(2, round(STEPS * (small / 2 if small < 1 else 1.0)))
    shared = {"images": setting.images, "steps": steps, "dtype": setting.config().dtype}
    runs = {
        run_name(f"{kind}-{layers}", seed): ComputedCall(
            {"kind": kind, "blocks": DEPTHS[layers], "seed": seed, **shared},
            flops=6.0 * MULTIPLICATIONS * layers / 20 * BATCH * steps,
        )
        for seed in range(setting.seeds)
        for layers in depths
        for kind in kinds
    }
    return [Arm("cifar10", computed=Computed(f"{__name__}:train", runs))]


def analyse(setting: Setting, measured: Measured) -> StudyResult:
    """Compare test errors at each depth with the ResNet's (with the plain network's if there is no ResNet)."""
    if setting.images is None:
        return StudyResult("Not run: it needs images, give --images with a folder or archive of train/CLASS/*.jpg.")
    tables, charts, sentences, values = [], [], [], {}
    asked = measured.asked_for("cifar10")
    kinds, depths = {_named(label)[0] for label in asked}, {_named(label)[1] for label in asked}
    # One baseline for each depth; depth reads have a second one, the same network without them.
    how: dict[str, Any] = {
        "quantity": "error",
        "comparisons": len(asked) - (0 if "standard" in kinds else len(depths)),
    }
    for layers in sorted({_named(label)[1] for label in measured.labels("cifar10")}):
        here = [label for label in asked if _named(label)[1] == layers]
        baseline = f"resnet-{layers}" if f"resnet-{layers}" in here else here[0]
        contrasts = contrast(measured, "cifar10", baseline, here, **how)
        tables.append(contrasts.table(f"{layers} layers: test error, percent", PUBLISHED))
        charts.append(
            dataclasses.replace(contrasts.chart(f"resnet-{layers}", f"{layers} layers"), caption=CAPTION, x_label=AXIS)
        )
        sentences.append(f"{layers} layers: {contrasts.sentence()}")
        values[str(layers)] = contrasts.values()
        if f"standard-{layers}" in here:  # the same network except for its reads
            reads = contrast(measured, "cifar10", f"standard-{layers}", [f"full-{layers}"], **how)
            if reads.others:
                tables.append(reads.table(f"{layers} layers, beside the same network without depth reads"))
                sentences.append(f"{layers} layers, of one layout: {reads.sentence()}")
                values[f"{layers}, reads"] = reads.values()
    return StudyResult(" ".join(sentences) or "Nothing has finished yet.", tables, charts, values)


STUDY = Design(
    "resnet",
    "Does depth attention help a ResNet?",
    "Plain networks and ResNets on CIFAR-10, and networks whose blocks are connected within a stage by depth reads at "
    "each position, in the preset's precision. Below the preset 100m the schedule is shortened.",
    "github.com/samitmohan's repository: Plain-20/32/44/56 9.26, 10.00, 11.22, 13.58; ResNet 8.64, 7.56, 7.62, 7.47 % "
    "(best epoch on the test images); nothing with depth attention.",
    arms,
    analyse,
)
