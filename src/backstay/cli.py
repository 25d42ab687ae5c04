"""The ``backstay`` command: the tools that need more than one part of the package.

May import every package; nothing imports it.
"""

from __future__ import annotations

from backstay.pserver.local_cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
