"""Other libraries, told of this package once they are imported, by whomever, and never imported for that."""

import importlib
import importlib.abc
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_waiting: dict[str, list[Callable[[Any], None]]] = {}
"""What is to be done with a module, by its name."""


def when_imported(name: str, act: Callable[[Any], None]) -> None:
    """Call `act` with the module of that name: at once where it is imported already, else right after it has been."""
    if name in sys.modules:
        act(sys.modules[name])
        return
    _waiting.setdefault(name, []).append(act)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the other finders find, with a loader that acts."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in _waiting:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Another loader, after whose work what was waiting is done; the module knows that loader alone."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        for act in _waiting.pop(module.__name__, ()):
            act(module)


_finder = _Finder()


def find_our_types(configuration_auto: Any) -> None:
    """Let Transformers' table of config classes import `attnres.models` when it is first asked for a type of ours."""
    table = configuration_auto.CONFIG_MAPPING

    class Types(type(table)):
        def __contains__(self, key: object) -> bool:
            _import_models(key)
            return super().__contains__(key)

        def __getitem__(self, key: str) -> Any:
            _import_models(key)
            return super().__getitem__(key)

    table.__class__ = Types


def _import_models(key: object) -> None:
    if str(key).startswith("attnres_"):
        importlib.import_module("attnres.models")
