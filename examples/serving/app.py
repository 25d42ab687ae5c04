"""Predicts over HTTP with a model of PyTorch that is still being trained.

It follows the export of a job (``exports:`` in the job file, or ``pserverctl export start``), so an
answer has what was learned a second ago. See README.md.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import torch
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

from backstay.trainer.torch.inference import load_for_inference


class Examples(BaseModel):
    """Features of some examples: for each argument of the model's ``forward`` nested lists."""

    features: dict[str, list[Any]]


def make_app(model_file: str, export: str, *, max_age_s: float = 60.0) -> FastAPI:
    """Return the service.

    Args:
        model_file: Of the job, or ``job.json`` of its ``log_dir``.
        export: Folder or URL of the job's export.
        max_age_s: ``/health`` answers 503 when what is served is older.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.model = load_for_inference(model_file, export, follow=True)
        with app.state.model.follower:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/predict")
    def predict(examples: Examples) -> dict[str, list[float]]:
        # FastAPI runs this in one of several threads: lookups need no lock.
        try:
            features = {name: torch.tensor(values) for name, values in examples.features.items()}
            with torch.no_grad():
                return {"predictions": app.state.model(**features).tolist()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise HTTPException(422, str(error)) from error

    @app.get("/health")
    def health() -> dict[str, Any]:
        status = asdict(app.state.model.follower.status)
        if status["age_s"] > max_age_s:
            raise HTTPException(503, status)
        return status

    return app


def app() -> FastAPI:
    """Return the service that ``MODEL`` and ``EXPORT`` of the environment name; for uvicorn."""
    return make_app(os.environ["MODEL"], os.environ["EXPORT"])
