"""The file in a saved folder with which Transformers finds our classes by itself: `trust_remote_code=True` and nothing
imported before."""

import json
from pathlib import Path
from typing import Any

NAME = "modeling_attnres"

_TEXT = '''"""Attention Residuals: the classes of this model are those of the package attnres."""

try:
    from attnres.models.classes import register_stored
except ImportError as error:
    raise ImportError("a model with Attention Residuals needs the package attnres: pip install attnres") from error

import json

CONFIG = json.loads({config!r})

globals().update(register_stored(CONFIG, __file__, trust_remote_code=True))  # this file runs where code is trusted
'''


def write_loader(config: Any, folder: Path, classes: dict[str, str]) -> dict[str, str]:
    """Write the file into `folder`, and return what config.json has as `auto_map`: nothing where the plain model itself
    brings its own code, which must be trusted first.

    Args:
        config: of the model; of a family that was probed it says where a layer is read.
        classes: by Auto class, the name of ours.
    """
    family = getattr(config, "residual_family", None)
    if family and family.get("remote"):
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    stored = config.stored
    if config.residual_file:
        stored |= {"residual": config.residual, "residual_file": config.residual_file}
    (folder / f"{NAME}.py").write_text(_TEXT.format(config=json.dumps(stored)), encoding="utf-8")
    return {auto: f"{NAME}.{name}" for auto, name in classes.items()}
