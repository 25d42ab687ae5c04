"""Serves a model while it is trained: follows a running export.

May import ``backstay.checkpoint``, the tables and the native module; knows no cluster, no
framework.
"""

from backstay.serving.follower import Follower, FollowerStatus
from backstay.serving.tables import FollowedTable

__all__ = ["FollowedTable", "Follower", "FollowerStatus"]
