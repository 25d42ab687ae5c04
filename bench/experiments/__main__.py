"""``python -m bench.experiments``: see bench.experiments.run."""

import sys

from bench.experiments.run import main

sys.exit(main())
