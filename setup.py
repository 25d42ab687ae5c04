"""The Rust extension: an editable install gets the simulator's nodes, a wheel does not.

Metadata is in setup.cfg, the settings of tools in pyproject.toml.
"""

import sys

from setuptools import setup
from setuptools_rust import Binding, RustExtension

FOR_DEVELOPERS = not {"editable_wheel", "--inplace"}.isdisjoint(sys.argv)

setup(
    rust_extensions=[
        RustExtension(
            "backstay._native",
            path="crates/backstay-py/Cargo.toml",
            binding=Binding.PyO3,
            py_limited_api=True,
            # Without this an editable install builds the unoptimised profile, and every
            # measurement lies.
            debug=False,
            args=[] if FOR_DEVELOPERS else ["--no-default-features"],
        )
    ]
)
