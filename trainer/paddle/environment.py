"""Who this process is and where its servers are: ``adapter.session``, by its old name.

Imports that module only.
"""

from backstay.trainer.adapter.session import Session, TrainerEnvironment, current_session, init

__all__ = ["Session", "TrainerEnvironment", "current_session", "init"]
