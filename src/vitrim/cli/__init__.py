"""The command line: one file per subcommand. Torch is imported only when a command runs, so the help is fast."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from vitrim import __version__
from vitrim.cli import (
    analyze,
    bench,
    compare,
    convert,
    demo,
    env,
    evaluate,
    export,
    freeze,
    listing,
    optimize,
    page,
    profile,
    show,
    train,
    tune,
)
from vitrim.cli.help import Command, CommandGroup
from vitrim.cli.options import flat
from vitrim.errors import EXTRAS, VitrimError, one_line

INTERRUPTED = 130
TERMINATED = 143
"""Exit codes of Ctrl-C and SIGTERM, as shells use them."""
ENDED = {INTERRUPTED: "interrupted", TERMINATED: "terminated"}
ERRORS: Any = getattr(typer, "TyperException", None) or import_module("click").ClickException  # typer's since 0.28
OF_THE_SYSTEM = {
    *(errno.EACCES, errno.EPERM, errno.EROFS),  # no permission
    *(errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE),  # no room
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EIO),
}
"""Errors caused by names or the user's system, not by this program."""

SAME = (
    {"--data", "--images", "--dataset"},
    {"--dtype", "--precision"},
    {"--checkpoint", "--weights"},
)
"""Synonyms; a command has one of each."""

COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo.demo,
    "list": listing.list_,
    "profile": profile.profile,
    "bench": bench.bench,
    "eval": evaluate.evaluate,
    "compare": compare.compare,
    "analyze": analyze.analyze,
    "show": show.show,
    "train": train.train,
    "tune": tune.tune,
    "freeze": freeze.freeze,
    "optimize": optimize.optimize,
    "export": export.export,
    "app": page.app,
    "convert": convert.convert,
    "env": env.env,
}

app = typer.Typer(
    help="Faster Vision Transformers by reducing their tokens.",
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for name, command in COMMANDS.items():
    app.command(name, cls=Command)(flat(command))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"vitrim {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="print the version and exit")
    ] = False,
) -> None:
    """Faster Vision Transformers by reducing their tokens. A method is written name:key=value,key=value."""


def main() -> None:
    """Entry point of the ``vitrim`` script: bad input gives one line on standard error and exit code 2.

    Ctrl-C and SIGTERM clean up partial files and exit with the usual codes of shells.
    """
    warnings.showwarning = _warn
    if not sys.stderr.isatty():  # progress bars of `datasets` would clutter logs
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    try:
        with _terminable():
            code = app(standalone_mode=False)
    except VitrimError as error:
        sys.exit(_fail(str(error)))
    except ERRORS as error:
        # without a subcommand typer prints the help and raises an empty error
        sys.exit(_fail(_usage_error(error)) if error.format_message() else 2)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS or find_spec(package) is not None:
            raise  # a bug, or a package that is installed and lacks another one
        sys.exit(_fail(f"this needs the package '{package}': pip install '.[{EXTRAS[package]}]'"))
    except OSError as error:
        if error.errno not in OF_THE_SYSTEM:
            raise  # a bug: show the traceback
        where = "" if error.filename is None else f"{error.filename}: "
        sys.exit(_fail(f"{where}{error.strerror}"))
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except SystemExit as end:
        if end.code != TERMINATED:
            raise
        code = TERMINATED
    if code in ENDED:  # typer returns that of Ctrl-C
        print(ENDED[code], file=sys.stderr)
        sys.exit(code)


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM raise `SystemExit`, so that work in progress is cleaned up."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _warn(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Print a warning as one line, without its place in the code."""
    print(f"warning: {one_line(str(message))}", file=sys.stderr)


def _usage_error(error: Any) -> str:
    """The message for an invalid command line; for an unknown option, it suggests an alternative."""
    from vitrim.loading import SIZES  # reads YAML: help does without

    name = getattr(error, "option_name", None)
    if name is None or error.ctx is None:
        return str(error.format_message())
    takes = error.ctx.command.params
    own = {option for one in takes if one.param_type_name == "option" for option in one.opts}
    # A synonym goes before an argument of that name, then an option of the model, then similar spelling.
    same = {word for words in SAME if name in words for word in words & own}
    key = name.strip("-").replace("-", "_")
    if key.upper() in {one.metavar for one in takes if one.param_type_name == "argument"}:
        return f"no option {name}: write it without, vitrim {error.ctx.info_name} {key.upper()}"
    longer = sorted((option for option in own if option.startswith(f"-{name}")), key=len)  # one letter
    if "--model-option" in own and name.startswith("--") and not same and (key in SIZES or not error.possibilities):
        return f"no option {name}; an option of the library's model is written --model-option {key}=VALUE"
    meant = [*sorted(same), *(error.possibilities or ()), *longer]  # the nearest first
    return f"no option {name}" + (f"; did you mean {meant[0]}?" if meant else "")


def _fail(message: str) -> int:
    print(f"error: {one_line(message)}", file=sys.stderr)
    return 2
