"""``python -m backstay.cli``: the same as the ``backstay`` command."""

from backstay.cli import main

if __name__ == "__main__":
    main()
