"""Import at first use: names of this package (PEP 562), hooks that run when another library is imported, and names from
a user's file."""

import functools
import hashlib
import importlib
import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make `__getattr__` and `__dir__` for a package, which import public names from their modules, and submodules.

    Args:
        package: `__name__` of the package.
        homes: name -> the module that defines it.
    """

    def get(name: str) -> Any:
        if name in homes:
            value = getattr(importlib.import_module(homes[name]), name)
            setattr(sys.modules[package], name, value)
            return value
        if not name.startswith("_"):
            try:
                return importlib.import_module(f"{package}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{package}.{name}":
                    raise
        raise AttributeError(f"module '{package}' has no attribute '{name}'")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names


class FromFile(NamedTuple):
    """A name from a user's file, and its value.

    Attributes:
        value: the class, function or other object.
        entry: FILE.py:NAME with the whole path.
        sha256: hash of the file's content.
    """

    value: Any
    entry: str
    sha256: str


def from_file(entry: str, what: str, fits: Callable[[Any], bool] = callable) -> FromFile:
    """Import NAME from FILE.py. A file is run once for each content that it has.

    Args:
        what: what NAME is expected to be, "class" or "function"; `fits` selects the names that an error suggests.

    Raises:
        UserError: the file is missing or raises, or lacks the name.
    """
    from attnres.errors import USER_FILE, UserError, unknown  # here: `import attnres` needs neither
    from attnres.files import user_path

    file, _, name = entry.rpartition(":")
    path = user_path(file).resolve()
    if not path.is_file():
        raise UserError(f"'{entry}': there is no file {path}; expected FILE.py:{what.upper()}")
    # A module name for each file and content, so that a class is made once and can be pickled in this process.
    content = path.read_bytes()
    digest = hashlib.sha256(bytes(path) + content).hexdigest()[:12]
    module_name = f"{USER_FILE}{path.stem}_{digest}"
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            # Not with the spec's loader, which uses stale bytecode for a file that changed within a second.
            exec(compile(content, path, "exec", dont_inherit=True), vars(module))
        except (Exception, SystemExit) as error:
            del sys.modules[module_name]
            raise UserError(f"{path} cannot be run ({type(error).__name__}: {error}): fix it first") from error
    value = getattr(module, name, None)
    if value is None:
        raise unknown(f"{what} in {path}", name, [key for key, value in vars(module).items() if fits(value)])
    return FromFile(value, f"{path}:{name}", hashlib.sha256(content).hexdigest())


_waiting: dict[str, list[Callable[[Any], None]]] = {}
"""Module name -> functions to call with the module once it is imported."""


def when_imported(name: str, act: Callable[[Any], None]) -> None:
    """Call `act` with the module of that name: now if it is already imported, else right after its import."""
    if name in sys.modules:
        act(sys.modules[name])
        return
    _waiting.setdefault(name, []).append(act)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as the other finders do, and wraps their loader."""

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
    """Wraps a loader, and calls the waiting functions after it has run; the module's spec names the wrapped loader."""

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
    """Let Transformers import `attnres.models` when it first meets a model type of this package: in its table of config
    classes, or in a config.json, which for a probed family says where its layers are read."""
    table, config = configuration_auto.CONFIG_MAPPING, configuration_auto.PreTrainedConfig
    # Why not with Transformers' own means: AutoConfig.register takes a finished class, and making ours would import
    # torch and the modelling code of every family at each `import attnres`. Transformers reads no entry points. Its own
    # lazy table names modules inside `transformers.models` alone, and a probed family's key is in a config.json that
    # nobody has read yet. The subclass of the table's class adds to it and takes nothing away; what another library
    # registers or patches there stays in force.

    class Types(type(table)):
        def __contains__(self, key: object) -> bool:
            _import_models(key)
            return super().__contains__(key)

        def __getitem__(self, key: str) -> Any:
            _import_models(key)
            return super().__getitem__(key)

    table.__class__ = Types
    plain = config.get_config_dict.__func__

    @functools.wraps(plain)
    def get_config_dict(cls: Any, name: Any, *args: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        fields, rest = plain(cls, name, *args, **options)
        if _is_ours(fields.get("model_type")):
            importlib.import_module("attnres.models.classes").register_stored(fields, name)
            if cls is not config and not _is_ours(cls.model_type):
                warnings.warn(
                    f"a model with depth reads was loaded as the plain {cls.__name__}: its residual is left out, and "
                    "it computes something else; AutoModel and attnres.load keep it",
                    stacklevel=3,
                )
        return fields, rest

    config.get_config_dict = classmethod(get_config_dict)


def _is_ours(model_type: object) -> bool:
    return str(model_type).startswith("attnres_")


def _import_models(key: object) -> None:
    if _is_ours(key):
        importlib.import_module("attnres.models")
