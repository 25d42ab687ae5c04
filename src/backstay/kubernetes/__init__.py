"""The job on Kubernetes: its objects, its worker Pods, its own servers, its status.

docs/adr/0012-kubernetes.md says which process makes what. ``names``, ``pod_template``, ``objects``,
``pserver_objects``, ``pod_exit`` and ``worker_pods`` decide from values and never call. ``api``
alone talks to Kubernetes; ``pod_launcher``, ``published_status`` and ``master_pod`` join the two.
The job master's process is ``backstay.kubernetes.master``.
"""
