"""backstay: a replicated, consistent, elastic parameter-server cluster."""

from backstay._version import __version__

__all__ = ["__version__"]
