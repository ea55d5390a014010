"""A service on the small model that comes with vitrim."""

from __future__ import annotations

import pytest

from app_files import MODEL, Here, encoded
from vitrim.app.drawings import draw
from vitrim.app.records import Source
from vitrim.app.service import Service


@pytest.fixture(scope="session")
def service() -> Service:
    return Service([Source(MODEL, "reference")])


@pytest.fixture(scope="session")
def jobs(service: Service) -> Here:
    return Here(service)


@pytest.fixture(scope="session")
def ship() -> bytes:
    return encoded(draw("ship"))
