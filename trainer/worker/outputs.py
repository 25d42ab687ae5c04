"""Predictions to files: one for each task, whole or not there at all.

A task that is done twice leaves one file: the task names the file, and the second one replaces the
first. This module may import numpy and fsspec.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import secrets
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem
from numpy.typing import NDArray

from backstay.errors import ConfigError, DataUnavailable
from backstay.trainer.worker.task_feed import TaskRange

__all__ = ["PredictionFiles", "try_writing"]


def try_writing(name: str, url: str) -> None:
    """Write a small file to a folder and remove it; folders made for that are removed, too.

    Args:
        name: Of the field that names the folder, for the message.
        url: A folder, or a URL that fsspec knows.

    Raises:
        ConfigError: It cannot be written to.
    """
    made: list[Path] = []
    try:
        files, root = fsspec.core.url_to_fs(url)
        if isinstance(files, LocalFileSystem):
            missing = [each for each in (Path(root), *Path(root).parents) if not each.exists()]
            made = missing
        files.makedirs(root, exist_ok=True)
        path = f"{root}/.try-{secrets.token_hex(4)}.tmp"
        files.pipe_file(path, b"backstay\n")
        files.rm_file(path)
    # The packages of protocols have errors of their own, of no common class.
    except Exception as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{name}: cannot write to {url}: {reason}") from error
    finally:
        for each in made:
            with contextlib.suppress(OSError):
                each.rmdir()


class PredictionFiles:
    """A folder of CSV files with a line for each record, in the order of the data.

    The columns are ``shard``, ``record`` (its number in the shard, damaged records left out
    within a task) and ``prediction``; ``prediction_0``, ``prediction_1``, ... where the model
    answers several numbers.

    Args:
        url: A folder, or a URL that fsspec knows.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
            self._files.makedirs(self._root, exist_ok=True)
        except (OSError, ValueError, ImportError) as error:
            raise DataUnavailable(f"output: {url} cannot be written to: {error}") from error

    def write(self, task: int, part: TaskRange, predictions: NDArray[Any]) -> str:
        """Write the predictions of a task; returns where.

        Args:
            task: Its number.
            part: What it covers.
            predictions: [n] or [n, width], in the order of the good records.

        Raises:
            DataUnavailable: It cannot be written.
        """
        path = f"{self._root}/part-{task:06d}.csv"
        content = _csv(part, predictions)
        try:
            if isinstance(self._files, LocalFileSystem):
                aside = f"{path}.{secrets.token_hex(4)}.tmp"
                self._files.pipe_file(aside, content)
                os.replace(aside, path)
            else:
                # Object stores show a file when it is whole, not before.
                self._files.pipe_file(path, content)
        except OSError as error:
            raise DataUnavailable(f"output: {path} cannot be written: {error}") from error
        return path


def _csv(part: TaskRange, predictions: NDArray[Any]) -> bytes:
    rows = np.asarray(predictions)
    rows = rows.reshape(len(rows), -1)
    width = rows.shape[1] if rows.size else 1
    names = ["prediction"] if width == 1 else [f"prediction_{n}" for n in range(width)]
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["shard", "record", *names])
    # repr of a Python float of float32's digits: what reads back to the same number.
    for number, row in enumerate(rows.astype(str).tolist() if rows.size else []):
        writer.writerow([part.shard, part.start + number, *row])
    return text.getvalue().encode()
