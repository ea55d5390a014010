"""Tables that the files of a folder enter themselves into, so that a new method, host, task or loss is one new file.

A table is a dict; a decorator enters into it what it decorates, and whoever reads it first discovers the folder. An
import error in a file surfaces: an entry that silently does not exist is worse than a traceback.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from torch import nn

from vitrim.core.block import Idle, Reducer
from vitrim.core.hooks import altered, is_foreign, refuse_own_forward
from vitrim.core.host import Host, VisionLanguage
from vitrim.core.method import Kind, MethodConfig
from vitrim.core.modules import access
from vitrim.core.plan import Layer
from vitrim.core.saving import read_method_file
from vitrim.errors import UnsupportedModelError, VitrimError, unknown

K = TypeVar("K")
Value = TypeVar("Value")


@cache
def discover(package: str) -> None:
    """Import every module of ``package``, once: what they register is then known."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")


@cache
def discover_naming(package: str, text: str) -> None:
    """Import the modules of ``package`` whose source has ``text``: those that register it, and no others.

    A library has many families of models, and importing one imports the library's own file of it. Modules that come
    without their source are imported.
    """
    for name, source in _sources(package).items():
        if source is None or text in source:
            importlib.import_module(name)


@cache
def _sources(package: str) -> Mapping[str, str | None]:
    """The source of every module of ``package`` by its full name; None where it is not there."""
    found: dict[str, str | None] = {}
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        loader: Any = getattr(importlib.util.find_spec(module.name), "loader", None)
        found[module.name] = loader.get_source(module.name) if hasattr(loader, "get_source") else None
    return found


def enter(table: dict[K, Any], key: K, value: object, what: str) -> None:
    """Register ``value`` under ``key``, which can be done only once.

    Raises:
        VitrimError: there is such an entry; ``what`` names it.

    Example:
        >>> enter({"tome": 1}, "tome", 2, "method 'tome'")
        Traceback (most recent call last):
        vitrim.errors.VitrimError: method 'tome' is registered twice, by 1 and 2
    """
    if key in table:
        raise VitrimError(f"{what} is registered twice, by {table[key]} and {value}")
    table[key] = value


def entry_of(table: Mapping[Any, Value], kind: type) -> Value | None:
    """The entry of a class, or else of the first that has one among those it inherits from; None if none has.

    Example:
        >>> entry_of({int: "number"}, bool)
        'number'
    """
    for base in kind.__mro__:
        if base in table:
            return table[base]
    return None


C = TypeVar("C", bound=MethodConfig)
H = TypeVar("H", bound=Host)
V = TypeVar("V", bound=VisionLanguage)
R = TypeVar("R")
T = TypeVar("T")

Choice = Callable[[Any, Layer], type[Reducer[Any]] | None]
"""From a config and a layer to the class of its reducer; None where the method does nothing."""

_METHODS: dict[str, type[MethodConfig]] = {}
_HOSTS: dict[str, type[Host]] = {}
_REFUSED: dict[str, str] = {}
_VISION_LANGUAGE: dict[str, type[VisionLanguage]] = {}
_REDUCERS: dict[type[MethodConfig], Choice] = {}


def register_method(config: type[C]) -> type[C]:
    """Class decorator: register a method's config under its ``name``. A name can be registered only once.

    Raises:
        VitrimError: the class has no name or an unknown kind, or the name is taken.
    """
    if not config.name:
        raise VitrimError(f'{config.__name__} has no name: write name = "..." in the class')
    if config.kind not in get_args(Kind):
        raise VitrimError(f"unknown kind '{config.kind}' of {config.__name__}; valid: {', '.join(get_args(Kind))}")
    enter(_METHODS, config.name, config, f"method '{config.name}'")
    return config


def reduces(config: type[MethodConfig]) -> Callable[[R], R]:
    """Class decorator: name the reducer of a method, or, on a function, choose one by config and layer.

    Blocks without an amount get an `Idle` reducer, unless the class says that it acts ``everywhere``.

    Example:
        >>> from vitrim import MethodConfig, Reducer, reduces
        >>> class Nothing(MethodConfig):
        ...     name = "nothing"
        >>> @reduces(Nothing)
        ... class NothingReducer(Reducer[Nothing]):
        ...     site = "before"
    """

    def register(reducer: R) -> R:
        choice = _always(reducer) if isinstance(reducer, type) else cast(Choice, reducer)
        enter(_REDUCERS, config, choice, f"the reducer of '{config.name}'")
        return reducer

    return register


def _always(reducer: type) -> Choice:
    def choose(config: MethodConfig, layer: Layer) -> type[Reducer[Any]] | None:
        kind = cast("type[Reducer[Any]]", reducer)
        return kind if kind.everywhere or layer.amount is not None else None

    return choose


def make_reducer(config: MethodConfig, layer: Layer) -> Reducer[Any]:
    """The reducer of one layer, looked up over the classes of ``config``; an `Idle` one where the method does nothing.

    Raises:
        VitrimError: an option does not fit the model.
    """
    choice = entry_of(_REDUCERS, type(config))
    if choice is None:
        raise VitrimError(f"method '{config.name}' has no reducer: register one with @reduces({type(config).__name__})")
    return (choice(config, layer) or Idle)(config, layer)


def register_host(*model_classes: str) -> Callable[[type[H]], type[H]]:
    """Class decorator: register a host family for models of the given classes, each as ``module.ClassName``.

    The name is a string: a model is looked up over the names of the classes it inherits from, and two libraries may
    both have a ``VisionTransformer``.
    """

    def register(host: type[H]) -> type[H]:
        for key in model_classes:
            enter(_HOSTS, key, host, f"host '{key}'")
        return host

    return register


register_backbone = register_host  # its name in 0.1.0


def refuse_host(model_class: str, reason: str) -> None:
    """Say why models of a class, ``module.ClassName``, are no hosts: `host_of` then gives the ``reason``."""
    enter(_REFUSED, model_class, reason, f"refusal of '{model_class}'")


def register_vision_language(*model_classes: str) -> Callable[[type[V]], type[V]]:
    """Class decorator: register a family of vision-language models, named as for `register_host`."""

    def register(family: type[V]) -> type[V]:
        for key in model_classes:
            enter(_VISION_LANGUAGE, key, family, f"vision-language model '{key}'")
        return family

    return register


def methods() -> dict[str, type[MethodConfig]]:
    """Every method's config class by name, sorted.

    Example:
        >>> "tome" in methods()
        True
    """
    discover("vitrim.methods")
    return dict(sorted(_METHODS.items()))


@cache
def libraries() -> tuple[str, ...]:
    """The host libraries vitrim knows, installed or not: the folders of ``hosts/``."""
    package = importlib.import_module("vitrim.hosts")
    return tuple(sorted({module.name for module in pkgutil.iter_modules(package.__path__)} - {"shared"}))


def missing_libraries() -> tuple[str, ...]:
    """The `libraries` that are not installed."""
    return tuple(library for library in libraries() if importlib.util.find_spec(library) is None)


def hosts() -> dict[str, type[Host]]:
    """Every host family of the installed libraries by the model class it serves, sorted. Imports those libraries."""
    missing = missing_libraries()
    for library in libraries():
        if library not in missing:
            discover(f"vitrim.hosts.{library}")
    return dict(sorted(_HOSTS.items()))


def vision_languages() -> dict[str, type[VisionLanguage]]:
    """Every family of vision-language models by the model class it serves, sorted; as `hosts`."""
    hosts()  # they are in the same folders
    return dict(sorted(_VISION_LANGUAGE.items()))


def find_host(model: nn.Module) -> type[Host] | None:
    """The host family of ``model``, looked up over the classes it inherits from; None if there is none."""
    return _find(_HOSTS, type(model))


def find_vision_language(model: nn.Module) -> type[VisionLanguage] | None:
    """The family of vision-language models of ``model``; None if it is of none."""
    return _find(_VISION_LANGUAGE, type(model))


def reads_prompts(kind: type) -> bool:
    """Tell whether models of a class are of a family of vision-language models.

    Example:
        >>> reads_prompts(nn.Linear)
        False
    """
    return _find(_VISION_LANGUAGE, kind) is not None


def vision_language(model: nn.Module) -> tuple[nn.Module, type[VisionLanguage]]:
    """The outermost vision-language model in ``model``, or itself, and its family.

    Raises:
        UnsupportedModelError: there is none that is known.
    """
    for part in model.modules() if isinstance(model, nn.Module) else ():
        if (family := find_vision_language(part)) is not None:
            return part, family
    raise UnsupportedModelError(
        f"compact=True is for vision-language models, and {type(model).__name__} is none that is known: see 'Fewer "
        "image tokens for a language model' in docs/hosts.md"
    )


def _find(table: Mapping[str, T], kind: type) -> T | None:
    """The entry of a class, or else of the first that has one among those it inherits from."""
    for base in kind.__mro__:
        library = base.__module__.partition(".")[0]
        key = f"{base.__module__}.{base.__qualname__}"
        if key not in table and library in libraries():
            discover_naming(f"vitrim.hosts.{library}", f'"{key}"')  # one file of many: each imports its models
        if key in table:
            return table[key]
    return None


def has_trunk(model: nn.Module) -> bool:
    """Tell whether the class of ``model``, or of the backbone in it, has a host family.

    Example:
        >>> has_trunk(nn.Linear(2, 2))
        False
    """
    host = find_host(model)
    return host is not None and (host.trunk_host(model) is host or bool(host.blocks(model)))


def host_of(model: nn.Module) -> type[Host]:
    """The host family of ``model``.

    Raises:
        UnsupportedModelError: naming the class, and the parts of ``model`` that are supported.
    """
    host = find_host(model)
    if host is not None:
        if not host.blocks(model):
            raise UnsupportedModelError(f"this {type(model).__name__} has no blocks: there is nothing to reduce")
        return host
    name, parts = type(model).__name__, supported_parts(model)
    if parts:
        named = " or ".join(f"{access(where)} ({type(part).__name__})" for where, part in parts[:2])
        more = f" or {len(parts) - 2} others" if len(parts) > 2 else ""
        raise UnsupportedModelError(f"{name} is not a supported host itself: reduce {named}{more} instead")
    for where, part in model.named_modules():
        if reason := _find(_REFUSED, type(part)):
            raise UnsupportedModelError(f"{access(where)} ({type(part).__name__}) is refused: {reason}")
        if where and (reason := refusal(part)):
            raise UnsupportedModelError(
                f"{name} is not a supported host itself, and {access(where)} is refused: {reason}"
            )
    raise UnsupportedModelError(
        f"{name} (from {type(model).__module__}) is not a supported host; `vitrim list hosts` prints those that are"
    )


def supported_parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost supported hosts inside ``model``, itself not a host, by their names in it and in order.

    Wrappers (of adapters, compilation, several devices) and models of several parts hold one. Those whose own check
    refuses them are left out.
    """
    found: list[tuple[str, nn.Module]] = []
    for name, part in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if name and not inside and _is_host(part):
            found.append((name, part))
    return found


def _is_host(part: nn.Module) -> bool:
    backbone = find_host(part)
    return backbone is not None and bool(backbone.blocks(part)) and refusal(part) is None


def check_model(host: type[Host], model: nn.Module) -> None:
    """Refuse a ``model`` of the family ``host`` that cannot be reduced faithfully.

    Raises:
        UnsupportedModelError: saying why.
    """
    host.check(model)
    trunk = host.trunk_host(model)
    for depth, block in enumerate(host.blocks(model)):
        refuse_own_forward(block, depth, "call vitrim.reduce_ again")
        for part in trunk.reduced_class(block).bypassed(block):
            if is_foreign(part):
                raise UnsupportedModelError(altered(part, host.name))


def refusal(part: nn.Module) -> str | None:
    """The reason why a model of a supported class is refused; None where it is not, or is of no such class."""
    backbone = find_host(part)
    if backbone is None or not backbone.blocks(part):
        return None
    try:
        check_model(backbone, part)
    except UnsupportedModelError as error:
        return str(error)
    return None


def make_method(name: str, /, **options: Any) -> MethodConfig:
    """The config of the method called ``name``, with validated options.

    Raises:
        VitrimError: an unknown method, option or value, in one line with the valid ones.

    Example:
        >>> make_method("tome", r=8).r
        8
    """
    table = methods()
    if not isinstance(name, str):
        raise VitrimError(f"expected the name of a method, e.g. tome, got {type(name).__name__}")
    if name not in table:
        raise unknown("method", name, table)
    return table[name](**options)


def parse_method(text: str) -> MethodConfig:
    """The method written as ``name`` or ``name:key=value,key=value``, or in a file: ``@FILE``. Lists are in brackets.

    A file is a saved reduction, the result of a search, or a text file of one line. Learned parameters are not read.

    Raises:
        VitrimError: an unknown method, option or value, text of another form, or a file without a method.

    Example:
        >>> parse_method("tome:r=[16,8,4]").r
        (16, 8, 4)
    """
    if not isinstance(text, str):
        raise VitrimError(f"expected a method as text, e.g. tome:r=13, got {type(text).__name__}")
    if text.strip().startswith("@"):
        return _from_file(Path(text.strip()[1:]))
    name, _, rest = text.strip().partition(":")
    options: dict[str, Any] = {}
    for part in split_options(rest):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise VitrimError(f"cannot read '{part}' in '{text}': write name:key=value,key=value, e.g. tome:r=13")
        if key.strip() in options:
            raise VitrimError(f"'{key.strip()}' is given twice in '{text}'")
        options[key.strip()] = read_value(value.strip(), key.strip())
    return make_method(name.strip(), **options)


def parse_methods(methods: MethodConfig | str | Sequence[MethodConfig | str] | None) -> list[MethodConfig]:
    """One method or several, as configs or texts, as a list of configs.

    Raises:
        VitrimError: a method is unknown, or given twice.

    Example:
        >>> [config.describe() for config in parse_methods(["tome:r=8", "evit:keep_rate=0.7"])]
        ['tome:r=8', 'evit:keep_rate=0.7']
    """
    given = [methods] if isinstance(methods, MethodConfig | str) else methods or ()
    configs = [method if isinstance(method, MethodConfig) else parse_method(method) for method in given]
    twice = next((config for place, config in enumerate(configs) if config in configs[:place]), None)
    if twice is not None:
        raise VitrimError(f"method {twice.describe()} is given twice")
    return configs


def _from_file(path: Path) -> MethodConfig:
    found = read_method_file(path)
    if isinstance(found, str):
        return parse_method(found)
    try:
        config = make_method(found["method"], **found["options"])
    except VitrimError as error:
        hint = "" if found["method"] in methods() else "; import the file that registers it if it is your own"
        raise VitrimError(f"{path}: {error}{hint}") from None
    if found.get("version", config.version) != config.version:
        raise VitrimError(
            f"{path} is of version {found['version']} of {config.name}, this vitrim has version {config.version}"
        )
    return config.found_for(found["tuned"]["made_for"]) if found.get("tuned") else config


def split_options(text: str) -> list[str]:
    """Parts between commas that are outside brackets."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += character
    parts.append(current)
    return [part for part in parts if part.strip()]


def read_value(text: str, key: str) -> Any:
    """A JSON value where ``text`` is one (number, true, null, list), else the text itself.

    Args:
        text: as it was written.
        key: what it is of, for messages.

    Raises:
        VitrimError: a number of more digits, or lists within more lists, than can be read.

    Example:
        >>> read_value("[16,8]", "r"), read_value("floor_current", "rule")
        ([16, 8], 'floor_current')
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
    except (ValueError, RecursionError):  # what JSON allows and Python does not
        raise VitrimError(f"{key}: a value of {len(text)} characters that cannot be read: {text[:20]}...") from None


OWN = "vitrim"
"""The folder of hosts that answers for models of no library: users' models are treated like vitrim's own."""

_GENERAL: dict[str, type[Host]] = {}


def register_library(*libraries: str) -> Callable[[type[H]], type[H]]:
    """Class decorator: register a host that answers for all models of some libraries without a family of their own."""

    def register(host: type[H]) -> type[H]:
        for library in libraries:
            enter(_GENERAL, library, host, f"library '{library}'")
        return host

    return register


def ask(model: nn.Module) -> type[Host]:
    """The host that answers questions about ``model``, which may be any model.

    Example:
        >>> import timm, torch
        >>> ask(timm.create_model("test_vit")).name
        'timm VisionTransformer'
        >>> ask(timm.create_model("test_resnet")).logits(torch.zeros(2, 3)).shape
        torch.Size([2, 3])
    """
    host = find_host(model)
    if host is not None:
        return host
    for base in type(model).__mro__:
        library = base.__module__.partition(".")[0]
        if library in libraries():
            discover_naming(f"vitrim.hosts.{library}", "@register_library(")
        if library in _GENERAL:
            return _GENERAL[library]
    discover_naming(f"vitrim.hosts.{OWN}", "@register_library(")
    return _GENERAL[OWN]
