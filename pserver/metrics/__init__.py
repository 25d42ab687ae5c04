"""What a node shows of itself to Prometheus and to ``pserverctl``.

``figures`` keeps what the control plane counts, ``families`` turns everything into metrics;
``backstay.metrics_endpoint`` serves them. docs/reference/metrics.md explains each metric.
"""
