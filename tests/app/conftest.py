"""A service on the small model that comes with vitrim."""

from __future__ import annotations

import pytest

from app_files import EXAMPLES, MODEL, Here
from vitrim.app.messages import ModelSource
from vitrim.app.service import Service


@pytest.fixture(scope="session")
def service() -> Service:
    return Service([ModelSource(MODEL, "reference")], seconds=3600.0)  # a busy machine times, too


@pytest.fixture(scope="session")
def jobs(service: Service) -> Here:
    return Here(service)


@pytest.fixture(scope="session")
def ship() -> bytes:
    return (EXAMPLES / "ship.png").read_bytes()
