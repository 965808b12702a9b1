"""Finding a user's function by its written name: ``package.module:function`` or ``file.py:function``.

Functions travel between processes as that name, never by pickle. Names are looked up from the folder
that the command was started in, as ``python`` itself would.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.errors import ConfigError

_IMPORTING = threading.RLock()
"""Held by who imports a file: sessions on threads of their own may all want it at once."""


def load_function(path: str, folder: Path, is_wanted: Callable[[Any], bool] = callable) -> Callable[..., Any]:
    """The function that ``path`` names; ``folder`` is where files and modules are looked up first.

    ``is_wanted``: what passes for one. By default whatever can be called.

    ``package.module.function`` is taken too. Raises ConfigError if there is no such file, module or
    function, or if importing it fails.
    """
    where, colon, name = path.rpartition(":")
    if not colon:
        where, _, name = path.rpartition(".")
    if not where or not name:
        raise ConfigError(f"found {path!r}; expected package.module:function or file.py:function")
    if where.endswith(".py"):
        with _IMPORTING:
            module = _load_file(folder / where, path)
    else:
        module = _load_module(where, folder, path)
    function: Any = module
    for part in name.split("."):
        if not hasattr(function, part):
            names = sorted(n for n in vars(module) if not n.startswith("_") and callable(getattr(module, n)))
            raise ConfigError(
                f"{path}: found no {name!r} in {where}; expected one of its functions: "
                f"{', '.join(names) or 'it has none'}"
            )
        function = getattr(function, part)
    if not is_wanted(function):
        raise ConfigError(
            f"{path}: found {type(function).__name__}, which cannot be called; expected a function"
        )
    found: Callable[..., Any] = function
    return found


def _load_module(name: str, folder: Path, path: str) -> ModuleType:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{path}: found no module {error.name!r} on the path or in {folder}; "
                "expected package.module:function or file.py:function"
            ) from error
        raise ConfigError(f"{path}: importing it failed: {type(error).__name__}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{path}: importing it failed: {type(error).__name__}: {error}") from error


def _load_file(file: Path, path: str) -> ModuleType:
    if not file.is_file():
        raise ConfigError(f"{path}: found no file {file}; expected file.py:function")
    # A name of its own, so that two files of one name in different folders stay apart.
    digest = hashlib.blake2b(str(file.resolve()).encode(), digest_size=6).hexdigest()
    name = f"asyncrl_user_{file.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: {file} cannot be imported; expected a Python file")
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{path}: importing it failed: {type(error).__name__}: {error}") from error
    return module
