"""The elements of a running export at one place: a folder, or any URL that fsspec knows.

An element exists when its manifest does: it is written last and removed first. All methods wait for
the disk or the network; callers with an event loop use threads. Imports ``checkpoint.element``,
``checkpoint.roots`` and ``backstay.errors``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backstay.checkpoint.documents import FileEntry
from backstay.checkpoint.element import ELEMENT_FILE, Element, kind_of, number_of
from backstay.checkpoint.manifest import check_part_name
from backstay.checkpoint.roots import LocalRoot, open_root, read_document
from backstay.errors import CheckpointDamaged, CheckpointUnavailable, InvalidRequest

__all__ = ["ExportFolder"]


class ExportFolder:
    """The elements at one place.

    Args:
        url: A path, ``file://...``, ``s3://bucket/folder``, or what else fsspec knows.
        options: For fsspec's file system; credentials are best left to the environment.

    Raises:
        ConfigError: There is no such protocol, or its package is not installed.
    """

    def __init__(self, url: str | Path, options: Mapping[str, Any] | None = None) -> None:
        self._root = open_root(str(url), options)

    @property
    def url(self) -> str:
        """Where it is, without credentials."""
        return self._root.url

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of this machine, where parts are written in place."""
        return isinstance(self._root, LocalRoot)

    def names(self) -> list[str]:
        """Return the ids of all elements, finished or not, in their order.

        Raises:
            CheckpointUnavailable: It cannot be read; so does every method here.
        """
        found = (one for one in self._root.folders() if kind_of(one) is not None)
        return sorted(found, key=lambda one: (number_of(one), one))

    def is_finished(self, element: str) -> bool:
        """Return whether an element has its manifest."""
        return self._root.has(element, ELEMENT_FILE)

    def read(self, element: str) -> Element | None:
        """Return an element; None if it is not finished, or not there.

        Raises:
            CheckpointDamaged: Its manifest is damaged, or another element's.
        """
        where = f"{element}/{ELEMENT_FILE}"
        try:
            text = read_document(self._root, element, ELEMENT_FILE)
        except FileNotFoundError:
            return None
        found = Element.from_text(text, where)
        if found.id != element:
            raise CheckpointDamaged(f"{where}: it is the manifest of {found.id}")
        return found

    def newest(self) -> Element | None:
        """Return the element with the highest number that is finished; None: there is none.

        Raises:
            CheckpointDamaged: Its manifest is damaged.
        """
        for name in reversed(self.names()):
            if (found := self.read(name)) is not None:
                return found
        return None

    def create(self, element: str) -> None:
        """Begin an element: make its folder."""
        number_of(element)
        self._root.make_folder(element)

    def finish(self, element: Element) -> None:
        """Write the manifest of an element whose parts are all there.

        Raises:
            CheckpointDamaged: A part is missing or has another length; nothing is written.
        """
        for part in element.parts:
            size = self._size(element.id, part.file)
            if size != part.bytes:
                raise CheckpointDamaged(
                    f"{element.id}/{part.file}: {size} bytes, {part.bytes} were written: is "
                    f"{self.url} the same folder on every node?"
                )
        self._root.write(element.id, ELEMENT_FILE, element.text().encode())

    def delete(self, element: str) -> None:
        """Remove an element, finished or not. The manifest goes first."""
        number_of(element)
        self._root.remove(element, ELEMENT_FILE)
        self._root.remove_folder(element)

    def publish(self, element: str, local_file: Path, name: str) -> None:
        """Copy a finished part there; not needed where :attr:`is_local`."""
        check_part_name(name)
        self._root.put(local_file, element, name)

    def part_path(self, element: str, name: str) -> Path:
        """Return where a node writes a part in place.

        Raises:
            InvalidRequest: It is not local.
        """
        check_part_name(name)
        number_of(element)
        if not isinstance(self._root, LocalRoot):
            raise InvalidRequest(f"{self.url} is not a folder of this machine")
        return self._root.path_of(element, name)

    def fetch(self, element: str, part: FileEntry, into: Path) -> Path:
        """Return a part as a file of this machine: itself where :attr:`is_local`, else a copy.

        Raises:
            CheckpointDamaged: It is missing, or has another length.
        """
        size = self._size(element, part.file)
        # The check comes before the copy: a file that is far too long would fill the disk.
        if size != part.bytes:
            raise CheckpointDamaged(
                f"{element}/{part.file}: {size} bytes, the manifest says {part.bytes}"
            )
        try:
            return self._root.get(element, part.file, into)
        except FileNotFoundError as error:
            raise CheckpointUnavailable(f"{element}/{part.file}: {error}") from error

    def _size(self, element: str, name: str) -> int:
        check_part_name(name)
        try:
            return self._root.size(element, name)
        except FileNotFoundError as error:
            raise CheckpointDamaged(f"{element}/{name}: missing at {self.url}") from error
