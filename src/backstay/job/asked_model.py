"""The model that is to be loaded for inference: a model file, or the job that trained it.

Imports the definition and the job's description; no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from backstay.errors import ConfigError
from backstay.job.model_definition import ModelDefinition, load
from backstay.job_spec import DataSpec, JobSpec

__all__ = ["asked_model"]


def asked_model(
    path: str | Path,
    *,
    job: str | None,
    only_job: Callable[[], str],
    model_params: Mapping[str, Any] | None = None,
) -> tuple[ModelDefinition, JobSpec, str]:
    """Load a model file; return it with the job that trained it, and that job's name.

    Args:
        path: The model file; or ``job.json``, which ``backstay train`` leaves in ``log_dir``.
        job: Whose tables are wanted. None: those of ``job.json``; of a model file, ``only_job``'s.
        only_job: Returns the only job that there is.
        model_params: Arguments of its ``custom_model``. Default: those of the job.

    Raises:
        ConfigError: The file is missing or wrong.
    """
    file = Path(path)
    if file.suffix != ".json":
        # Only the fields of the job that say how the model is made are used.
        job = only_job() if job is None else job
        spec = JobSpec(
            name=job or "inference",
            model=str(file),
            training=DataSpec(paths=("unread",)),
            model_params=dict(model_params or {}),
        )
        return load(spec.model, model_params=spec.model_params), spec, job
    try:
        spec = JobSpec.from_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    params = spec.model_params if model_params is None else model_params
    callback_params = spec.callback_params
    definition = load(spec.model, model_params=params, callback_params=callback_params)
    return definition, spec, spec.model_from or spec.name if job is None else job
