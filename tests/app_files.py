"""Jobs of the page in this process, and files as users upload them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vitrim
from vitrim.app.messages import Offer
from vitrim.app.service import Service

MODEL = "vitrim:cifar10_vit"
EXAMPLES = Path(vitrim.__path__[0]) / "app" / "examples"


class Here:
    """Runs jobs in this process, one service for all users, as the worker does in its own."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.offers: Sequence[Offer] = service.offers()

    def call(self, job: str, *given: Any, first: tuple[str, ...] = ()) -> Any:
        if first:
            getattr(self.service, first[0])(*first[1:])
        return getattr(self.service, job)(*given)


def encoded(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    """An image of PIL as the bytes of a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
