"""The error of a dataset that cannot be read."""

from __future__ import annotations

from vitrim.errors import VitrimError


class DataError(VitrimError):
    """Raised for a dataset that cannot be read as asked; the message is one line and says what is valid.

    Example:
        >>> from vitrim.data import load_images
        >>> try:
        ...     load_images("no-such-folder")
        ... except DataError as error:
        ...     print(str(error).split(";")[0])
        no-such-folder does not exist: there is no 'no-such-folder' in .
    """

    def __init__(self, message: str) -> None:
        # from a worker process the message arrives as a whole traceback, which ends with the error itself
        super().__init__(message.rpartition(f"{__name__}.DataError: ")[2].strip())
