"""Keywords that functions of commands took before they took objects: they work for one release, with a line."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

RENAMED = {
    "model": "models",
    "model_options": "ModelSpec.options",
    "seed": "ModelSpec.seed",
    "data": "DataSpec.source",
    "data_options": "DataSpec.options",
    "few_images": "DataSpec.few",
    "text_tokens": "Prompt.text",
    "prompt_images": "Prompt.images",
    "format": "Results.formats",
    "repeats": "Budget.min_rounds",
    "search": "SearchSpec.strategy",
    "front": "target",
    "capacity": "freeze",
    "on_setting": "on_report",
    "on_stop": "on_report",
}
"""Keywords whose field, or parameter, has another name now."""
JOINED = {"files": "methods", "more_models": "models"}
"""Lists that stand in another one now."""


def earlier(**objects: type[Any]) -> Callable[[Function], Function]:
    """A decorator of a function: it goes on to take the keywords that are fields of its arguments now.

    Args:
        objects: the parameters that are objects, each with its dataclass, whose first field is what can be given in its
            place: a model, a source, a folder.

    Example:
        >>> @dataclasses.dataclass
        ... class Images:
        ...     source: str
        ...     limit: int | None = None
        >>> count = earlier(data=Images)(lambda data: data)
        >>> with warnings.catch_warnings(record=True) as told:
        ...     warnings.simplefilter("always")
        ...     count("folder", limit=3)
        Images(source='folder', limit=3)
        >>> print(told[0].message)
        limit is a field now, and no keyword from the next release on: data=Images(..., limit=...)
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        fields = {
            f"{kind.__name__}.{field.name}": (name, field.name)
            for name, kind in objects.items()
            for field in dataclasses.fields(kind)
        }

        @functools.wraps(function)
        def run(*given: Any, **named: Any) -> Any:
            former: dict[str, dict[str, Any]] = {}
            figure = None if "figure" in signature.parameters else named.pop("figure", None)
            if figure is not None:
                from vitrim.plots import style

                _tell("a report has its figure from the next release on: report.figure.savefig(...)")
                style.check(Path(figure))
                report = run(*given, **named)
                style.save(report.figure, Path(figure))
                return dataclasses.replace(report, files=[*report.files, Path(figure)])
            for name in [name for name in named if name not in signature.parameters]:
                new = RENAMED.get(name, name)
                places = [place for full, place in fields.items() if new in (full, place[1])]
                if new in signature.parameters:
                    if new in named:
                        raise TypeError(f"{name} is called {new} now, and both are given")
                    _tell(f"{name} is called {new} now, and has its old name for this release")
                    named[new] = named.pop(name)
                elif name == "compiled":
                    _tell('compiled=True is engine="compile" from the next release on')
                    if named.pop(name):
                        named["engine"] = "compile"
                elif name in JOINED:
                    place = JOINED[name]
                    _tell(f"{name} are given among the {place} from the next release on")
                    more = named.pop(name)
                    bound = signature.bind_partial(*given, **named)
                    own = bound.arguments.get(place)
                    own = list(own) if isinstance(own, list | tuple) else [] if own is None else [own]
                    bound.arguments[place] = [*own, *more]
                    given, named = bound.args, bound.kwargs
                elif name == "threads":
                    from vitrim.measure.machine import set_threads

                    _tell("threads are those of torch from the next release on: torch.set_num_threads(...)")
                    set_threads(named.pop(name))
                elif places:
                    parameter, field = places[0]
                    former.setdefault(parameter, {})[field] = named.pop(name)
                    shown = f"{parameter}={objects[parameter].__name__}(..., {field}=...)"
                    _tell(f"{name} is a field now, and no keyword from the next release on: {shown}")
            if former:
                bound = signature.bind_partial(*given, **named)
                bound.apply_defaults()
                for name, values in former.items():
                    own, kind = bound.arguments.get(name), objects[name]
                    if not isinstance(own, kind):
                        first = dataclasses.fields(kind)[0]
                        bare = own is None and first.default is not dataclasses.MISSING
                        own = kind() if bare else kind(**{first.name: own})
                    bound.arguments[name] = dataclasses.replace(own, **values)
                return function(*bound.args, **bound.kwargs)
            return function(*given, **named)

        return cast(Function, run)

    return decorate


def _tell(line: str) -> None:
    warnings.warn(line, DeprecationWarning, stacklevel=3)
