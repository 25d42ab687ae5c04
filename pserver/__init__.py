"""A node of the cluster: its control plane, its commands, and the library to start one locally.

Its own commands, the tests, the benchmarks and the examples import it, the last three mostly for
``local_cluster``; the trainer never does. Rows and gradients never pass
through its Python code; that is the native data plane's work.
"""

if __name__ != "backstay.pserver":
    raise ImportError(f"import this package as backstay.pserver, not as {__name__}")
