"""Depth reads inside Hugging Face decoders; importing this registers the classes with Transformers' Auto classes."""

from attnres.models.build import build, load
from attnres.models.classes import CLASSES, DepthMixin
from attnres.models.convert import Conversion, convert
from attnres.models.exchange import export_foreign, import_foreign
from attnres.models.families import FAMILIES, Family, FamilyRow, families_table
from attnres.models.foreign import load_foreign, save_foreign
from attnres.models.sizes import SIZES
from attnres.models.stream import Stream

__all__ = [
    "CLASSES",
    "FAMILIES",
    "SIZES",
    "Conversion",
    "DepthMixin",
    "Family",
    "FamilyRow",
    "Stream",
    "build",
    "convert",
    "export_foreign",
    "families_table",
    "import_foreign",
    "load",
    "load_foreign",
    "save_foreign",
]
