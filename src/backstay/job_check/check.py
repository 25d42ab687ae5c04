"""What can be told of a job before anything of it is started: its model file and its data.

Loads the model file, and with it the framework, so it runs the file's top level code; the command
has a process of its own do it (``backstay.job_check.process``). Starts nothing; leaves no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from backstay.data import Reader, open_reader
from backstay.data.opening import open_source
from backstay.errors import BackstayError, ConfigError, DataError
from backstay.job import model_definition
from backstay.job.data_scan import first_look
from backstay.job.model_definition import ModelDefinition, user_traceback
from backstay.job_check.data_marks import Marks, marks_of
from backstay.job_spec import JobSpec
from backstay.settings import suggestion
from backstay.trainer.worker.outputs import try_writing
from backstay.trainer.worker.scoring import answers_logits
from backstay.trainer.worker.task_feed import groups_by

__all__ = ["Checked", "check_data", "check_folders", "check_job", "load_definition"]


@dataclass(frozen=True)
class Checked:
    """A job that may begin.

    Attributes:
        warnings: About its data.
        marks: Of its data, as it is now.
    """

    warnings: tuple[str, ...]
    marks: Marks

    @classmethod
    def from_mapping(cls, document: Mapping[str, Any]) -> Checked:
        """Return what ``to_mapping`` wrote."""
        return cls(tuple(document["warnings"]), document["marks"])

    def to_mapping(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


def load_definition(spec: JobSpec) -> ModelDefinition:
    """Load a job's model file and hold it against the job.

    Raises:
        ConfigError: It is missing or fails, lacks a function, or does not fit the job.
    """
    definition = model_definition.load(
        spec.model, model_params=spec.model_params, callback_params=spec.callback_params
    )
    definition.framework(spec.framework)
    rule = spec.early_stop
    if rule is not None and rule.metric not in definition.metrics:
        raise ConfigError(
            f"early_stop.metric: {rule.metric!r} is none of the model file's eval_metrics "
            f"({', '.join(definition.metrics) or 'it has none'})"
        )
    if spec.progressive is not None:
        answers_logits(spec.progressive, definition.metrics)
    processor = definition.prediction_outputs_processor
    if spec.prediction is not None and not spec.output and processor is None:
        raise ConfigError(
            "output: predictions have nowhere to go; name a folder, or give the model file a "
            "PredictionOutputsProcessor"
        )
    return definition


def check_data(spec: JobSpec, definition: ModelDefinition) -> list[str]:
    """Return warnings about a job's data.

    Raises:
        ConfigError: An option is wrong, there are no records, or the user's reader fails.
        DataUnavailable: It cannot be read, or there are no such files.
        DataDamaged: It is not of its format.
    """
    warnings = []
    for name, data in spec.data.items():
        try:
            if spec.grows(name):
                # There need be no record yet.
                source = open_source(data)
                warnings.append(source.look(source.start()).trouble)
                source.close()
                continue
            reader = open_reader(data, module=definition.module)
            warnings.append(first_look(name, data, reader))
            _check_groups_column(groups_by(spec, name), reader)
        except ConfigError as error:
            text = str(error)
            named = text.startswith((name, "progressive."))
            raise ConfigError(text if named else f"{name}.{text}") from error
        except DataError as error:
            raise type(error)(f"{name}: {error}") from error
        except BackstayError:
            raise
        except Exception as error:
            if data.kind != "custom":
                raise
            text = user_traceback(error, definition.path)
            raise ConfigError(f"{name}: the custom reader failed:\n{text}") from error
    return [warning for warning in warnings if warning]


def _check_groups_column(column: str, reader: Reader) -> None:
    """Refuse a column of ``progressive.by`` that records have not, as far as that is known."""
    if not column:
        return
    names = reader.metadata.column_names
    if names and column not in names:
        raise ConfigError(
            f"progressive.by: the training data has no column {column!r}; there are "
            f"{', '.join(names)}{suggestion(column, names)}"
        )


def check_folders(spec: JobSpec) -> None:
    """Try whether the folders that the job is to write to can be written to.

    Raises:
        ConfigError: One cannot.
    """
    try_writing("log_dir", spec.log_dir)
    if spec.output and spec.kind != "evaluation":
        try_writing("output", spec.output)


def check_job(spec: JobSpec) -> Checked:
    """Check model file, data and folders.

    Raises:
        BackstayError: As the functions above do.
    """
    check_folders(spec)
    warnings = check_data(spec, load_definition(spec))
    return Checked(tuple(warnings), marks_of(spec))
