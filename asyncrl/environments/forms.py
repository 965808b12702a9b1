"""The forms of environments that people already have, told apart by what the object is.

A form is told by its methods, asyncrl's own first: ``reset`` and ``step`` are ours, ``init`` and ``step``
skyrl_gym's, ``env_response`` is verifiers' (v0), ``score`` and ``data_type`` a Task's of verifiers (v1), and
``reset`` with tools or ``get_reward`` is TRL's. ``environment.form`` says it outright.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.environments.adapters.base import Adapter, OwnEnvironment, close
from asyncrl.environments.adapters.skyrl import SkyRLEnvironment, by_row, of_class
from asyncrl.environments.adapters.trl import TRLEnvironment, methods
from asyncrl.environments.adapters.verifiers_v0 import VerifiersEnvironment, rubric_of
from asyncrl.environments.adapters.verifiers_v1 import VerifiersTask, require_offline
from asyncrl.environments.agents import load_agent
from asyncrl.environments.tools import Settle, ToolEnvironment, alone, reader, schema
from asyncrl.errors import ConfigError
from asyncrl.functions import load_function

if TYPE_CHECKING:
    from asyncrl.config import EnvironmentSection

Make = Callable[[Settle], Adapter]
"""Makes one trajectory's environment, on the thread that it is to live on."""

TOOLS = "tools"
SKYRL = "skyrl_gym"
_REGISTERED = f"{SKYRL}:"


def recognise(thing: Any) -> str:
    """The form of a class or an object; ``asyncrl`` where nothing else fits."""

    def has(*names: str) -> bool:
        return all(callable(getattr(thing, name, None)) for name in names)

    if has("reset", "step"):
        return "asyncrl"
    if has("init", "step"):
        return SKYRL
    if has("env_response") or has("score", "data_type"):
        return "verifiers"
    if has("reset") and (has("get_reward") or methods(thing)):
        return "trl"
    return "asyncrl"


def load(setup: Mapping[str, Any]) -> Make:
    """What makes environments in a worker. Raises ConfigError for what cannot be found or is of no form.

    A function is called once here, on the main thread, to see what it makes. verifiers' environments stay:
    one serves all trajectories.
    """
    path, args, folder = setup["path"], setup["args"], Path(setup["folder"])
    if setup["kind"] == "agent":
        return load_agent(path, args, setup["command"])
    if path == TOOLS:
        tools = {"tools": setup["tools"], "parse": setup["parse"], **args}
        return lambda settle: OwnEnvironment(ToolEnvironment(**tools, settle=settle), settle)
    if _is_registered(path):
        registered = by_row(path.removeprefix(_REGISTERED) if path != SKYRL else None, args, folder)
        return lambda settle: SkyRLEnvironment(registered, settle, setup["max_turns"])
    found = _found(path, folder)
    form = _told(found) if setup["form"] == "auto" else setup["form"]
    if form == SKYRL:
        of_row = of_class(found, args)
        return lambda settle: SkyRLEnvironment(of_row, settle, setup["max_turns"])
    if form == "verifiers" and inspect.isclass(found) and not _is_shared(found):
        task_type = found.task_type() if hasattr(found, "task_type") else found
        require_offline(task_type)
        return lambda settle: VerifiersTask(task_type, settle)
    _require_arguments(found, path, args)
    made = _made(found, path, args) if form in (None, "verifiers") else None
    form = recognise(made) if form is None else form
    read = reader(setup["parse"], folder)
    if form == "verifiers":
        rubric_of(made)
        return lambda settle: VerifiersEnvironment(made, settle, read)
    if made is not None:
        close(made, alone)
    _require_methods(found if made is None else made, path, form)
    if form == "trl":
        _require_shown(found, path, setup["form"])
        return lambda settle: TRLEnvironment(found(**args), settle, read)
    return lambda settle: OwnEnvironment(found(**args), settle)


def tool_schemas(section: EnvironmentSection, folder: Path) -> list[dict[str, Any]]:
    """Of the tools that the prompt has to show: those that the config names, or TRL's environment has.

    Raises ConfigError.
    """
    if section.tools:
        return [schema(load_function(path, folder)) for path in section.tools]
    if (
        section.kind == "agent"
        or section.path == TOOLS
        or _is_registered(section.path)
        or section.form not in ("auto", "trl")
    ):
        return []
    found = _found(section.path, folder)
    product = _product(found)
    if section.form == "trl":
        thing = product if inspect.isclass(product) else _made(found, section.path, section.args)
        return [schema(tool) for tool in methods(thing).values()]
    is_trl = inspect.isclass(product) and recognise(product) == "trl"
    return [schema(tool) for tool in methods(product).values()] if is_trl else []


def _found(path: str, folder: Path) -> Any:
    return load_function(path, folder, is_wanted=lambda thing: callable(thing) or _is_shared(thing))


def _is_registered(path: str) -> bool:
    """Whether ``path`` is no file's or module's, but means skyrl_gym's registry."""
    return path == SKYRL or path.startswith(_REGISTERED)


def _is_shared(thing: Any) -> bool:
    """Whether it is of verifiers v0, so that one serves all trajectories."""
    return hasattr(thing, "env_response")


def _told(found: Any) -> str | None:
    """The form of a class or an object; None of a function whose product has to be seen."""
    if inspect.isclass(found) or not callable(found):
        return recognise(found)
    return SKYRL if "extras" in inspect.signature(found).parameters else None


def _product(found: Any) -> Any:
    """The class itself, or what a function's annotation says that it makes."""
    if inspect.isclass(found):
        return found
    try:
        return typing.get_type_hints(found).get("return")
    except (NameError, TypeError):
        return None


def _made(found: Any, path: str, args: Mapping[str, Any]) -> Any:
    """One of what ``found`` makes, or ``found`` itself where it is an object."""
    if not callable(found):
        return found
    try:
        return found(**args)
    except Exception as error:
        raise ConfigError(f"{path} failed with args {dict(args)}: {type(error).__name__}: {error}") from error


def _require_arguments(found: Any, path: str, args: Mapping[str, Any]) -> None:
    if not callable(found):
        return
    try:
        inspect.signature(found).bind(**args)
    except TypeError as error:
        raise ConfigError(f"{path}: args {dict(args)}: {error}") from error


def _require_methods(thing: Any, path: str, form: str) -> None:
    if inspect.isfunction(thing):
        return  # its product is seen when it is made
    needed = ("reset",) if form == "trl" else ("reset", "step")
    missing = [name for name in needed if not callable(getattr(thing, name, None))]
    if missing:
        raise ConfigError(
            f"{path}: found no method {' and no '.join(missing)}; expected {' and '.join(needed)}"
        )


def _require_shown(found: Any, path: str, form: str) -> None:
    if form == "auto" and not inspect.isclass(_product(found)):
        raise ConfigError(
            f"{path}: found a function that makes TRL's environments, without a class as its return "
            "annotation; expected one, so that the prompt can show the tools: annotate it, or set "
            "environment.form to trl"
        )
