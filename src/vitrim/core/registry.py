"""The methods, selectors, hosts and libraries that vitrim knows, and `ask`, which answers for any model."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from torch import nn

from vitrim.core.block import Idle, Reducer, access, class_of
from vitrim.core.host import Host, VisionLanguage, alteration, class_alteration, refuse_own_forward
from vitrim.core.library import ImageHook, Library
from vitrim.core.method import Kind, MethodConfig
from vitrim.core.options import read_options
from vitrim.core.plan import Layer
from vitrim.core.saving import read_method_file
from vitrim.core.selection import Selector
from vitrim.core.tables import (
    Registry,
    discover,
    enter,
    entry_of,
    libraries,
    library_of,
    load_entry,
    needed_version,
    written_table,
)
from vitrim.core.versions import require
from vitrim.errors import UnsupportedModelError, VitrimError, check_known, unknown

C = TypeVar("C", bound=MethodConfig)
H = TypeVar("H", bound=Host)
L = TypeVar("L", bound=Library)
R = TypeVar("R")
S = TypeVar("S", bound=Selector)

ReducerFor = Callable[[Any, Layer], type[Reducer[Any]] | None]
"""Maps a config and a layer to the class of its reducer; None where the method does nothing."""

_METHODS: dict[str, type[MethodConfig]] = {}
_REDUCERS: dict[type[MethodConfig], type[Reducer[Any]] | ReducerFor] = {}
_SELECTORS: dict[str, type[Selector]] = {}


def register_method(config: type[C]) -> type[C]:
    """Class decorator: register a method's config under its ``name``, and check its ``kind``.

    The name must be free, or registered from the same place, which is replaced: a cell of a notebook may run twice.
    """
    if not config.name:
        raise VitrimError(f'{config.__name__} has no name: write name = "..." in the class')
    if config.kind not in get_args(Kind):
        raise VitrimError(f"unknown kind '{config.kind}' of {config.__name__}; valid: {', '.join(get_args(Kind))}")
    enter(_METHODS, config.name, config, f"method '{config.name}'")
    return config


def register_selector(selector: type[S]) -> type[S]:
    """Class decorator: register a selector of image tokens under its ``name``, which must be free."""
    if not selector.name:
        raise VitrimError(f'{selector.__name__} has no name: write name = "..." in the class')
    enter(_SELECTORS, selector.name, selector, f"selector '{selector.name}'")
    return selector


def reduces(config: type[MethodConfig]) -> Callable[[R], R]:
    """Class decorator: register the reducer of a method; on a function, a choice of reducers by config and layer.

    Blocks without an amount get an `Idle` reducer, unless the class acts ``everywhere``.

    Example:
        >>> from vitrim import MethodConfig, Reducer, reduces
        >>> class Nothing(MethodConfig):
        ...     name = "nothing"
        >>> @reduces(Nothing)
        ... class NothingReducer(Reducer[Nothing]):
        ...     site = "before"
    """

    def register(reducer: R) -> R:
        enter(_REDUCERS, config, reducer, f"the reducer of '{config.name}'")
        return reducer

    return register


def register(config: type[MethodConfig]) -> Callable[[R], R]:
    """Class decorator for the reducer of a new method: `register_method` and `reduces` in one.

    Example:
        >>> import vitrim
        >>> class Longest(vitrim.StagedConfig):
        ...     name = "longest"
        >>> @vitrim.register(Longest)
        ... class LongestReducer(vitrim.ScorerReducer[Longest]):
        ...     site = "before"
        ...     def score(self, x, attention, state):
        ...         return x[:, state.num_prefix :].norm(dim=-1)
        >>> vitrim.parse_method("longest:keep_rate=0.5").counts(196, 12)[-1]
        24
        >>> _ = _METHODS.pop("longest")  # it was an example
    """

    def enter_both(reducer: R) -> R:
        register_method(config)
        return reduces(config)(reducer)

    return enter_both


def make_reducer(config: MethodConfig, layer: Layer) -> Reducer[Any]:
    """The reducer of one layer; an `Idle` one where the method does nothing."""
    found = entry_of(_REDUCERS, type(config))
    if found is None:
        raise VitrimError(f"method '{config.name}' has no reducer: register one with @reduces({type(config).__name__})")
    kind: type[Reducer[Any]] | None
    if isinstance(found, type) and issubclass(found, Reducer):
        kind = found if found.everywhere or layer.amount is not None else None
    else:
        kind = cast(ReducerFor, found)(config, layer)
    return (kind or Idle)(config, layer)


def methods() -> dict[str, type[MethodConfig]]:
    """Every method's config class by name, sorted."""
    discover("vitrim.methods")
    return dict(sorted(_METHODS.items()))


def selectors() -> dict[str, type[Selector]]:
    """Every selector of image tokens by name, sorted."""
    discover("vitrim.selectors")
    return dict(sorted(_SELECTORS.items()))


_HOSTS: Registry[type[Host]] = Registry("HOSTS", "host")
_VISION_LANGUAGE: Registry[type[VisionLanguage]] = Registry("VISION_LANGUAGE", "vision-language model")
_SELECTED: Registry[type[VisionLanguage]] = Registry("SELECTED", "vision-language model")
_REFUSED: Registry[str] = Registry("REFUSED", "refusal")
_LIBRARIES: Registry[type[Library]] = Registry("LIBRARIES", "library")

OWN = "vitrim"
"""The hosts folder that answers for models of no known library: users' models are treated like vitrim's own."""


def register_host(*model_classes: str) -> Callable[[type[H]], type[H]]:
    """Class decorator: register your own host family for models of the given classes, ``module.ClassName`` each."""
    # Classes are named, not imported, and looked up along a model's base classes by module, because two libraries may
    # both have a `VisionTransformer`.
    return _HOSTS.register(model_classes)


def register_library(*names: str) -> Callable[[type[L]], type[L]]:
    """Class decorator: register a `Library` for all models of some libraries, or for classes ``module.ClassName``."""
    return _LIBRARIES.register(names)


def hosts() -> dict[str, type[Host]]:
    """Every host family of the installed libraries by model class, sorted. Imports those libraries."""
    return _HOSTS.all()


def vision_languages() -> dict[str, type[VisionLanguage]]:
    """Every family of vision-language models by model class, sorted. Imports the libraries."""
    return _VISION_LANGUAGE.all()


def find_host(model: nn.Module) -> type[Host] | None:
    """The host family of ``model``; None without one."""
    return _HOSTS.find(type(model))


def find_vision_language(model: nn.Module) -> type[VisionLanguage] | None:
    """The family of a vision-language ``model``; None without one."""
    return _VISION_LANGUAGE.find(type(model))


def ask(model: nn.Module) -> Library:
    """The `Library` that answers for ``model``, which may be any model.

    Example:
        >>> import timm, torch
        >>> ask(timm.create_model("test_vit")).host.name
        'timm VisionTransformer'
        >>> ask(timm.create_model("test_resnet")).logits(torch.zeros(2, 3)).shape
        torch.Size([2, 3])
    """
    # The class first, then its library; users' own models are answered like vitrim's.
    adapter = _LIBRARIES.find(type(model), library_of) or _LIBRARIES.entry(OWN)
    assert adapter is not None
    return adapter(find_host(model))


def taking_images(model: nn.Module) -> nn.Module:
    """``model``, or, if its inputs are of another form, a copy with its weights that takes images."""
    library = ask(model)
    if type(library).inputs_of is Library.inputs_of or any(
        isinstance(hook, ImageHook) for hook in model._forward_pre_hooks.values()
    ):
        return model
    copied = copy.deepcopy(model, {id(weight): weight for weight in chain(model.parameters(), model.buffers())})
    copied.register_forward_pre_hook(ImageHook(library, copied), prepend=True, with_kwargs=True)
    return copied


def refused_module(name: str) -> str:
    """The reason why models of a module, such as timm.models.resnet, are refused; "" without one."""
    return _REFUSED.entry(name) or ""


def support_libraries(model: nn.Module) -> None:
    """Prepare loaded libraries for reduced models, of which ``model`` contains one: run their ``ON_REDUCE`` entries."""
    for library in libraries():
        for module, place in written_table(library, "ON_REDUCE").items():
            if module in sys.modules:
                load_entry(library, place)(model)


def reads_prompts(kind: type) -> bool:
    """True if models of class ``kind`` are of a family of vision-language models."""
    return _VISION_LANGUAGE.find(kind) is not None


def find_prompted(model: nn.Module) -> type[VisionLanguage] | None:
    """The family of ``model``, or else one that can select image tokens behind an unreduced tower; None without one."""
    if (family := find_vision_language(model)) is not None:
        return family
    found = _SELECTED.find(type(model), library_of)
    return found if found is not None and found.serves(type(model)) else None


def vision_language(model: nn.Module, selecting: bool = False) -> tuple[nn.Module, type[VisionLanguage]]:
    """The outermost vision-language model in ``model``, which may be itself, and its family, or
    `UnsupportedModelError`.

    ``selecting``: also accept models of no listed family behind whose tower a selector can act.
    """
    around: list[nn.Module] = []
    for part in model.modules() if isinstance(model, nn.Module) else ():
        _refuse_older(type(part), "SELECTED" if selecting else "VISION_LANGUAGE")  # or a wider entry would stand in
        if (family := (find_prompted if selecting else find_vision_language)(part)) is not None:
            for outer in around:
                # The model around it would still expect the places of all image tokens.
                if part in outer.modules() and (_reads_prompt(outer) or _speaks_for(outer, part)):
                    raise UnsupportedModelError(
                        f"{type(outer).__name__} takes no features in place of images, as the {type(part).__name__} in "
                        "it does, so its prompts cannot follow those: "
                        + ("leave the selector out" if selecting else "use compact=False, which reduces the tower")
                    )
            return part, family
        around += [part] if library_of(type(part).__module__) in libraries() else []
    if selecting:
        raise UnsupportedModelError(
            f"select is for vision-language models, and {type(model).__name__} is none that is known: see "
            "docs/selection.md"
        )
    raise UnsupportedModelError(
        f"compact=True is for vision-language models, and {type(model).__name__} is none that is known: see 'Fewer "
        "image tokens for a language model' in docs/selection.md"
    )


def _reads_prompt(outer: nn.Module) -> bool:
    """True if the forward of ``outer``, around a vision-language model, may read every token of a prompt."""
    # One that hands `logits_to_keep` on reads the last logits only.
    arguments = inspect.signature(type(outer).forward).parameters
    return "input_ids" in arguments and "logits_to_keep" not in arguments


def _speaks_for(outer: nn.Module, part: nn.Module) -> bool:
    """True if ``outer`` generates text with ``part``, which does not by itself."""
    return hasattr(outer, "generate") and not hasattr(part, "generate")


def has_trunk(model: nn.Module) -> bool:
    """True if the class of ``model``, or of its backbone, has a host family."""
    host = find_host(model)
    return host is not None and (host.trunk_host(model) is host or bool(host.blocks(model)))


def reducible(model: nn.Module) -> bool:
    """True if a method can reduce ``model``, or a part of it.

    Example:
        >>> import timm
        >>> reducible(timm.create_model("test_vit")), reducible(timm.create_model("test_resnet"))
        (True, False)
    """
    return able_host(model) is not None or bool(supported_parts(model))


def able_host(model: nn.Module) -> type[Host] | None:
    """The host family of ``model`` if it can reduce it; None for a family unknown, or a form that is refused."""
    return find_host(model) if has_trunk(model) and refusal(model) is None else None


def fitting(model: nn.Module, methods: Sequence[MethodConfig]) -> list[MethodConfig]:
    """The ``methods`` to run beside the dense ``model``: all, or none where nothing reduces it and only ``none`` is
    asked.

    `UnsupportedModelError` if another one is, and ``model`` cannot be reduced.

    Example:
        >>> import timm
        >>> fitting(timm.create_model("test_resnet"), [parse_method("none")])
        []
    """
    other = next((method for method in methods if method.kind != "none"), None)
    if other is None:
        return list(methods) if reducible(model) else []
    if has_trunk(model) or supported_parts(model):
        return list(methods)
    try:
        host_of(model)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{other.describe()}: {error}; none measures this model as it is") from None
    return list(methods)


def input_size_of(model: nn.Module) -> tuple[int, int, int]:
    """Channels, height and width of the images that ``model`` was made for; an error if unknown."""
    found = ask(model).input_size(model)
    if found is None:
        if has_trunk(model) or supported_parts(model):
            host_of(model)  # says why not
        raise UnsupportedModelError(
            f"{type(model).__name__} does not say what images it takes: see vitrim.core.library.Library.input_size"
        )
    return found


def host_of(model: nn.Module) -> type[Host]:
    """The host family of ``model``; else `UnsupportedModelError` names supported parts, or the reason."""
    host = find_host(model)
    if host is not None:
        if not host.blocks(model):
            raise UnsupportedModelError(f"this {type(model).__name__} has no blocks: there is nothing to reduce")
        return host
    _refuse_older(type(model))
    name, parts = type(model).__name__, supported_parts(model)
    if parts:
        named = " or ".join(f"{access(where)} ({type(part).__name__})" for where, part in parts[:2])
        more = f" or {len(parts) - 2} others" if len(parts) > 2 else ""
        raise UnsupportedModelError(f"{name} is not a supported host itself: reduce {named}{more} instead")
    for where, part in model.named_modules():
        # parts are refused by class, not by module: a convolutional stem, say, is no reason
        if reason := _REFUSED.find(type(part), None if where else str):
            raise UnsupportedModelError(f"{access(where)} ({type(part).__name__}) is refused: {reason}")
        if where and (reason := refusal(part)):
            raise UnsupportedModelError(
                f"{name} is not a supported host itself, and {access(where)} is refused: {reason}"
            )
    own = (
        "; it looks like a ViT: if it is your own, say so in a few lines, vitrim.OwnHost, as 'A model of your own' in "
        "docs/hosts.md does"
        if looks_like_vit(model)
        else ""
    )
    raise UnsupportedModelError(
        f"{name} (from {type(model).__module__}) is not a supported host; `vitrim list hosts` prints those that are"
        + own
    )


def looks_like_vit(model: nn.Module) -> bool:
    """True if ``model`` takes images and has a list of like blocks, each with queries, keys and values.

    Example:
        >>> from torch import nn
        >>> blocks = nn.ModuleList(nn.MultiheadAttention(8, 2) for _ in range(2))
        >>> looks_like_vit(nn.ModuleList([nn.Conv2d(3, 8, 4, 4), blocks])), looks_like_vit(nn.Linear(2, 2))
        (True, False)
    """

    def attends(block: nn.Module) -> bool:
        parts = dict(block.named_modules())
        linear = {name.split(".")[-1]: part for name, part in parts.items() if isinstance(part, nn.Linear)}
        # A joint projection to three times the width, or three layers named after queries, keys and values.
        packed = any(part.out_features == 3 * part.in_features or "qkv" in name for name, part in linear.items())
        apart = all(any(name.startswith(letter) or f"to_{letter}" in name for name in linear) for letter in "qkv")
        return packed or apart or any(isinstance(part, nn.MultiheadAttention) for part in parts.values())

    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList | nn.Sequential) and len(part) > 1]
    return any(len({type(block) for block in blocks}) == 1 and all(map(attends, blocks)) for blocks in lists)


def _refuse_older(kind: type, table: str = "") -> None:
    """Refuse models of class ``kind`` whose family, or entry in ``table``, needs a newer library."""
    for base in kind.__mro__:
        key = f"{base.__module__}.{base.__qualname__}"
        listed = not table or {key, library_of(key)} & written_table(library_of(key), table).keys()
        if listed and (version := needed_version(key, table)) is not None:
            require(library_of(key), version.split()[1], f"reducing {kind.__name__}", UnsupportedModelError)


def supported_parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost supported hosts inside ``model`` that their host does not refuse, by name and in order."""
    found: list[tuple[str, nn.Module]] = []
    # Wrappers (adapters, compilation, several devices) and models of several parts contain them.
    for name, part in model.named_modules():
        if not name or any(name.startswith(f"{outer}.") for outer, _ in found):
            continue
        host = find_host(part)
        if host is not None and host.blocks(part) and refusal(part) is None:
            found.append((name, part))
    return found


def check_model(host: type[Host], model: nn.Module) -> None:
    """Raise `UnsupportedModelError` if ``model`` of the family ``host`` cannot be reduced faithfully."""
    host.check(model)
    trunk = host.trunk_host(model)
    kinds = set[type[nn.Module]]()
    for depth, block in enumerate(host.blocks(model)):
        refuse_own_forward(block, depth, "call vitrim.reduce_ again")
        bypassed = trunk.reduced_class(block).bypassed(block)
        kinds.update(map(class_of, (block, *bypassed)))
        for part in bypassed:
            if (problem := alteration(part)) is not None:
                raise UnsupportedModelError(f"{host.name}: {problem}")
    for kind in kinds:
        if (problem := class_alteration(kind)) is not None:
            raise UnsupportedModelError(f"{host.name}: {problem}")


def refusal(part: nn.Module) -> str | None:
    """The reason why ``part``, of a supported class, is refused; None if it is not, or its class is not supported."""
    backbone = find_host(part)
    if backbone is None or not backbone.blocks(part):
        return None
    try:
        check_model(backbone, part)
    except UnsupportedModelError as error:
        return str(error)
    return None


def make_method(name: str, /, **options: Any) -> MethodConfig:
    """The config of the method called ``name``, with validated options. An error lists the valid ones.

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
    """The method written as ``name:key=value,key=[value,value]``, or in a file, ``@FILE``.

    A file is a saved reduction, the result of a search, or one line of text. Learned parameters are not read.

    Example:
        >>> parse_method("tome:r=[16,8,4]").r
        (16, 8, 4)
    """
    if not isinstance(text, str):
        raise VitrimError(f"expected a method as text, e.g. tome:r=13, got {type(text).__name__}")
    if text.strip().startswith("@"):
        path = Path(text.strip()[1:])
        found = read_method_file(path)
        if isinstance(found, str):
            return parse_method(found)
        try:
            config = saved_config(found)
        except VitrimError as error:
            hint = "" if found["method"] in methods() else "; import the file that registers it if it is your own"
            raise VitrimError(f"{path}: {error}{hint}") from None
        version = config.traits.version
        if found.get("version", version) != version:
            raise VitrimError(
                f"{path} is of version {found['version']} of {config.name}, this vitrim has version {version}"
            )
        return config
    name, options = read_options(text, "tome:r=13")
    return make_method(name, **options)


def saved_config(saved: Mapping[str, Any]) -> MethodConfig:
    """The method of a file's entries, which knows the model that a search, or `freeze`, found it for."""
    config = make_method(saved["method"], **saved["options"])
    return config.found_for(saved["tuned"]["made_for"]) if saved.get("tuned") else config


def parse_selector(text: str | Selector) -> Selector:
    """The selector of image tokens written as ``name`` or ``name:key=value,key=value``; a `Selector` stays.

    Example:
        >>> parse_selector("divprune:tokens=64").tokens
        64
    """
    if isinstance(text, Selector):
        return text
    if not isinstance(text, str):
        raise VitrimError(f"expected a selector such as 'divprune:tokens=64', got {type(text).__name__}")
    name, options = read_options(text, "divprune:tokens=64")
    table = selectors()
    check_known("selector", name, table)
    return table[name](**options)


def parse_methods(methods: MethodConfig | str | Sequence[MethodConfig | str] | None) -> list[MethodConfig]:
    """One method or several, as configs or texts, as a list of configs.

    Example:
        >>> [config.describe() for config in parse_methods(["tome:r=8", "evit:keep_rate=0.7"])]
        ['tome:r=8', 'evit:keep_rate=0.7']
    """
    given = [methods] if isinstance(methods, MethodConfig | str) else methods or ()
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        name = methods.__name__ if isinstance(methods, type) else type(methods).__name__
        raise VitrimError(f"expected methods such as vitrim.ToMe(r=13) or 'tome:r=13', or a list of them, got {name}")
    configs = [method if isinstance(method, MethodConfig) else parse_method(method) for method in given]
    # Rows, curves and files are named by the method, so two of one name would mix.
    twice = next((config for place, config in enumerate(configs) if config in configs[:place]), None)
    if twice is not None:
        raise VitrimError(f"method {twice.describe()} is given twice")
    return configs
