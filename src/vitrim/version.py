"""The version of vitrim."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("vitrim")  # from the git tags at installation
except PackageNotFoundError:  # sources that were never installed
    __version__ = "0.0.0"
