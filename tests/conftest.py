"""Fixtures and hooks are in `suite.py`. The process of pytest-xdist that only deals tests out does without it: it would
import torch and its libraries first, and the workers wait for ten seconds."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        config.pluginmanager.import_plugin("suite")
