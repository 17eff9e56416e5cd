"""CIFAR-10 as arrays, from a folder or an archive of JPEGs (train/CLASS/*.jpg, test/CLASS/*.jpg)."""

import hashlib
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from attnres.cache import cache_dir
from attnres.errors import UserError
from attnres.files import write_bytes
from attnres.locks import lock
from attnres.paths import user_path


def load_images(source: str) -> dict[str, np.ndarray]:
    """The images of a folder or tar archive: train_x, test_x (n, 3, H, W) uint8, train_y, test_y (n,) int64.

    They are decoded once and kept in the cache. Classes are numbered in the order of their names.

    Raises:
        UserError: nothing there, no such images, one that cannot be read, images of several sizes, or test images of a
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
    """Split, class and bytes of every image, in order of name."""
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
            while stream.read(1 << 20):  # to its end, where a compressed one has its checksum
                pass
    except (tarfile.TarError, OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"{path} is no archive of images ({error})") from error
    for name in sorted(members):
        if part := _place(name):
            yield (*part, members[name])


def _place(name: str) -> tuple[str, str] | None:
    """Split and class of a file's name, which may have folders before them."""
    parts = PurePosixPath(name).parts
    for place, part in enumerate(parts[:-2]):
        if part in ("train", "test"):
            return part, parts[place + 1]
    return None
