"""A minimal re-creation of the interface of the original repository, which is no package that could be installed."""
