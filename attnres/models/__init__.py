"""Depth reads inside Hugging Face decoders; importing this registers the classes with Transformers' Auto classes."""

from .build import build, load
from .classes import CLASSES, DepthMixin
from .families import FAMILIES, Family
from .sizes import SIZES
from .stream import Stream

__all__ = ["CLASSES", "FAMILIES", "SIZES", "DepthMixin", "Family", "Stream", "build", "load"]
