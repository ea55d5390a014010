"""The version of vitrim, for the package and for what it writes."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("vitrim")  # from git's tags when it was installed
except PackageNotFoundError:  # sources on the path that were never installed
    __version__ = "0.0.0"
