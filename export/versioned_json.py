"""JSON files that this project writes and reads again: a bundle's manifest, an engine's, scales, golden files.

Each has a format version of its own. They come from strangers all the same, so whatever is wrong with one is a
sentence with what helps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashnext.export.errors import FlashNextError
from flashnext.export.files import plain, read_json_object


@dataclass(frozen=True)
class VersionedJson:
    """One kind of file: `what` it is, in the words of its errors, which are of type `error` and end with `remedy`."""

    what: str
    version: int
    max_bytes: int
    error: type[FlashNextError]
    remedy: str

    def read(self, path: Path) -> dict[str, Any]:
        """The object in a file.

        Raises:
            error: the file cannot be read, is too large, holds no JSON object, or one of another format version.
        """
        raw = read_json_object(path, self.error, self.what, self.max_bytes)
        found = raw.get("format_version")
        if type(found) is not int or found != self.version:
            raise self.error(
                f"{path} has format version {found!r:.40}, this release reads {self.version}. {self.remedy}"
            )
        return raw

    @contextmanager
    def parsing(self, path: Path) -> Iterator[None]:
        """Where values are taken from the object: one that is missing or of another type is damage.

        Raises:
            error: in place of what the lack of it raises.
        """
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError) as cause:
            raise self.error(f"{path} is damaged ({plain(repr(cause), 200)}). {self.remedy}") from None
