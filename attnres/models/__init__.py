"""Depth reads inside Hugging Face decoders; importing this registers the classes with Transformers' Auto classes."""

from attnres.models.bases import DepthMixin
from attnres.models.build import SIZES, build, build_plain
from attnres.models.classes import CLASSES
from attnres.models.convert import Conversion, convert
from attnres.models.export import export_model
from attnres.models.families import FAMILIES, Family, FamilyRow, families_table
from attnres.models.open import Checkpoint, load, open_checkpoint
from attnres.streams.attach import attach
from attnres.streams.stream import Stream


def register_classes() -> None:
    """Do nothing: importing this package has registered its classes with Transformers. Programs that find plug-ins by
    entry points call this, such as vLLM in each of its processes."""


__all__ = [
    "CLASSES",
    "FAMILIES",
    "SIZES",
    "Checkpoint",
    "Conversion",
    "DepthMixin",
    "Family",
    "FamilyRow",
    "Stream",
    "attach",
    "build",
    "build_plain",
    "convert",
    "export_model",
    "families_table",
    "load",
    "open_checkpoint",
    "register_classes",
]
