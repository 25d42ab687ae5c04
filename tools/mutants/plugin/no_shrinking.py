"""A plugin for pytest: a failing property is not made smaller, for nobody will read it.

Imports Hypothesis alone.
"""

from hypothesis import Phase, settings

settings.register_profile(
    "mutants",
    parent=settings.get_profile("ci"),
    phases=(Phase.explicit, Phase.generate),
    print_blob=False,
)
settings.load_profile("mutants")
