"""The help of a command on one screen: usage, an example, and options by group."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from typer.core import TyperCommand, TyperGroup

EXAMPLES = {
    "demo": "vitrim demo",
    "list": "vitrim list models deit",
    "profile": "vitrim profile deit_small_patch16_224 -m tome:r=13 -m evit:keep_rate=0.7",
    "bench": "vitrim bench deit_small_patch16_224 -m tome:r=13 -b 1,32",
    "eval": "vitrim eval deit_small_patch16_224 --pretrained -m tome:r=13 --data photos/",
    "compare": "vitrim compare vitrim:cifar10_vit -m tome:r=4 -m topk --data photos/",
    "analyze": "vitrim analyze vitrim:cifar10_vit -m tome:r=4 --data photos/ --out report",
    "show": "vitrim show deit_small_patch16_224 --pretrained photos/cat.jpg -m tome:r=13",
    "train": "vitrim train finetune --model vitrim:cifar10_vit -m tome:r=4 --data photos/",
    "tune": "vitrim tune vitrim:cifar10_vit -m tome --target macs=0.6 --data photos/",
    "freeze": "vitrim freeze vitrim:cifar10_vit -m atm:alpha=0.95 --images photos/",
    "optimize": "vitrim optimize deit_small_patch16_224 --pretrained --images photos/",
    "export": "vitrim export vitrim:cifar10_vit -m tome:r=4 --out model.onnx",
    "app": "vitrim app",
    "convert": "vitrim convert deit.pth deit.safetensors --key model",
    "env": "vitrim env",
}
"""An example per command."""
LEFT = 24
"""Columns for the names of options; a longer name gets a separate line."""
OPTIONS, MODEL, IMAGES, MACHINE = "Options", "Model", "Images", "Machine and output"
ORDER = (OPTIONS, MODEL, IMAGES, MACHINE)
WIDEST = 100
KINDS = {"int": "N", "float": "X", "Path": "PATH"}


class Command(TyperCommand):
    """A command with our help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        width = min(formatter.width, WIDEST)
        for line in _lines(self, ctx, width):
            formatter.write(f"{line}\n")


class CommandGroup(TyperGroup):
    """The program with our help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        width = min(formatter.width, WIDEST)
        formatter.write(f"vitrim COMMAND ...\n\n{textwrap.fill(_paragraphs(self.help)[0], width)}\n\n")
        for name, command in self.commands.items():
            # the first sentence, as far as it fits
            summary = _paragraphs(command.help)[0].partition(". ")[0].rstrip(".")
            formatter.write(f"  {name:<10}{textwrap.shorten(summary, width - 12, placeholder=' ...')}\n")
        formatter.write("\n")
        for line in _options(self.params, width):
            formatter.write(f"{line}\n")
        formatter.write("\nvitrim COMMAND -h prints the options of a command\n")


def _lines(command: Any, ctx: Any, width: int) -> Iterator[str]:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option"]
    usage = [_named(one) if one.required or "[" in _named(one) else f"[{_named(one)}]" for one in arguments]
    usage += [" ".join(_names(one)).split(", ")[-1] for one in options if one.required]
    yield f"vitrim {command.name} {' '.join(usage)} [OPTION]...".replace("  ", " ")
    for paragraph in _paragraphs(command.help):
        yield ""
        yield from textwrap.wrap(paragraph, width)
    if command.name in EXAMPLES:
        yield ""
        yield f"  {EXAMPLES[command.name]}"
    if arguments:
        yield ""
        for one in arguments:
            yield from _entry(_named(one).replace("[", "").replace("]", ""), _text(one), width)
    for group in ORDER:
        own = [one for one in options if (getattr(one, "rich_help_panel", None) or OPTIONS) == group]
        if own:
            yield ""
            yield group
            yield from _options(own, width)


def _options(options: Iterable[Any], width: int) -> Iterator[str]:
    for one in options:
        yield from _entry(" ".join(_names(one)), _text(one), width)


def _entry(name: str, text: str, width: int) -> Iterator[str]:
    """A name and its meaning, in two columns.

    Example:
        >>> print("\\n".join(_entry("--seed N", "of random weights and methods", 50)))
          --seed N              of random weights and
                                methods
    """
    lines = textwrap.wrap(text, width - LEFT, break_long_words=False, break_on_hyphens=False) or [""]
    if len(name) > LEFT - 3:
        yield f"  {name}"
    else:
        yield f"  {name:<{LEFT - 2}}{lines.pop(0)}".rstrip()
    yield from (" " * LEFT + line for line in lines)


def _names(option: Any) -> list[str]:
    """The names of an option, and a placeholder for its value."""
    names = ", ".join(sorted([*option.opts, *option.secondary_opts], key=len))
    return [names] if option.is_flag else [names, _value(option)]


def _value(option: Any) -> str:
    """A placeholder for the value of an option: its metavar, or by its type."""
    if option.metavar:
        return str(option.metavar)
    text = str(option.display_type(None)) if hasattr(option, "display_type") else ""
    for kind, word in KINDS.items():
        if kind.lower() in text.lower():
            return word
    return "TEXT"


def _named(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _text(parameter: Any) -> str:
    """The meaning of a parameter, and its default if that is informative."""
    text, default = str(parameter.help or ""), parameter.default
    if parameter.name == "help":
        text = "print this and exit"
    if parameter.name in ("install_completion", "show_completion"):
        text = "of names and options, for this shell" if parameter.name == "install_completion" else "print it"
    # Values that tell nothing, or that the text tells already, are not repeated.
    stated = "default" in text or default is None or isinstance(default, bool) or default == () or callable(default)
    if parameter.required and parameter.param_type_name == "option":
        return f"{text} (needed)"
    return text if stated or default == "" else f"{text} [{default}]"


def _paragraphs(text: str | None) -> list[str]:
    """The paragraphs of a docstring, each as one line.

    Example:
        >>> _paragraphs("Count.\\n\\nOne\\ntwo.")
        ['Count.', 'One two.']
    """
    return [" ".join(part.split()) for part in (text or "").split("\n\n") if part.strip()]
