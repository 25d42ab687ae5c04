"""Tasks that train nothing: evaluation, prediction and the end of training.

May import the program, the feed and the files of predictions. They push nothing, so a task that is
done twice does no harm.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
import numpy as np
from numpy.typing import NDArray

from backstay.errors import ConfigError, DataUnavailable
from backstay.job.callbacks import Callbacks, TrainEnd
from backstay.job.model_definition import ModelDefinition
from backstay.job_spec import JobSpec
from backstay.trainer.model.program import Program, predictions_of
from backstay.trainer.worker.evaluation import Outputs
from backstay.trainer.worker.outputs import PredictionFiles
from backstay.trainer.worker.task_feed import TaskFeed

__all__ = ["OtherTasks", "save"]

Check = Callable[[], None]


class OtherTasks:
    """What a program does besides training, on a cluster or in one process.

    Args:
        definition: The user's.
        spec: Of the job.
        worker_id: What the user's processor is told.
    """

    def __init__(self, definition: ModelDefinition, spec: JobSpec, worker_id: str) -> None:
        self._definition = definition
        self._spec = spec
        self._worker_id = worker_id
        self._processor: Any = None
        self._files: PredictionFiles | None = None

    def evaluate(self, feed: TaskFeed, program: Program, check: Check) -> Outputs:
        """Return what the model answers for the batches of a task, with their labels.

        Args:
            feed: The batches.
            program: The model, its values as of now.
            check: Called after each batch; what it raises ends the task.
        """
        outputs = Outputs()
        program.synchronize()
        for fed in feed:
            outputs.add(predictions_of(program, fed.features, len(fed.places)), fed.labels)
            check()
        return outputs

    def predict(self, feed: TaskFeed, number: int, program: Program, check: Check) -> int:
        """Hand predictions to the user's processor, or write them to a file of the task.

        Args:
            feed: The batches.
            number: Of the task.
            program: The model.
            check: Called after each batch; what it raises ends the task.

        Returns:
            How many records were predicted.

        Raises:
            ConfigError: There is neither a processor nor an output.
            DataUnavailable: The output cannot be written.
        """
        self._open_output()
        program.synchronize()
        parts: list[NDArray[Any]] = []
        records = 0
        for fed in feed:
            predictions = predictions_of(program, fed.features, len(fed.places))
            records += len(predictions)
            if self._processor is not None:
                self._processor.process(predictions, self._worker_id)
            else:
                parts.append(predictions)
            check()
        if self._files is not None:
            whole = np.concatenate(parts) if parts else np.empty(0, np.float32)
            self._files.write(number, feed.part, whole)
        return records

    def end_training(self, program: Program, callbacks: Callbacks) -> None:
        """Run the callbacks for the end, and save the model's own parameters to ``output``.

        Raises:
            DataUnavailable: The output cannot be written.
        """
        program.synchronize()
        spec = self._spec
        callbacks.training_ended(TrainEnd(program.model, spec.output, spec.epochs))
        self.save_model(program)

    def save_model(self, program: Program) -> None:
        """Save the model's own parameters to ``output``, if the job has one.

        Raises:
            DataUnavailable: The output cannot be written.
        """
        if self._spec.output:
            save(program, self._spec.output)

    def _open_output(self) -> None:
        if self._processor is not None or self._files is not None:
            return
        processor = self._definition.prediction_outputs_processor
        if processor is not None:
            self._processor = processor()
        elif self._spec.output:
            self._files = PredictionFiles(self._spec.output)
        else:
            raise ConfigError(
                "output: predictions have nowhere to go; name a folder, or give the model file a "
                "PredictionOutputsProcessor"
            )


def save(program: Program, url: str) -> None:
    """Write the model's own parameters to a folder or URL, each file whole.

    Raises:
        DataUnavailable: It cannot be written.
    """
    with TemporaryDirectory() as folder:
        paths = program.save(Path(folder))
        try:
            files, root = fsspec.core.url_to_fs(url)
            files.makedirs(root, exist_ok=True)
            for path in paths:
                # A name of its own: two workers may do this at once, and both leave whole files.
                aside = f"{root}/.{path.name}.{secrets.token_hex(4)}.tmp"
                files.put_file(str(path), aside)
                files.mv(aside, f"{root}/{path.name}")
        except (OSError, ValueError, ImportError) as error:
            raise DataUnavailable(f"output: {url} cannot be written to: {error}") from error
