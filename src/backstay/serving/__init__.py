"""Serving a model that is still being trained: rows of a running export, followed.

May import ``backstay.checkpoint``, the tables and the native module; knows no cluster, no
framework.
"""

from backstay.serving.follower import Follower, FollowerStatus
from backstay.serving.tables import FollowedTable

__all__ = ["FollowedTable", "Follower", "FollowerStatus"]
