"""Depth reads inside Hugging Face decoders; importing this registers the classes with Transformers' Auto classes."""

from .build import build, load
from .classes import CLASSES, DepthMixin
from .convert import Conversion, convert
from .exchange import export_foreign, import_foreign
from .families import FAMILIES, Family, FamilyRow, families_table
from .foreign import load_foreign, save_foreign
from .sizes import SIZES
from .stream import Stream

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
