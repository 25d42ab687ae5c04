"""All that knows Kubernetes: the objects of a job, its Pods, its own servers, its status.

docs/adr/0012-kubernetes.md says which process makes what. ``LAUNCHERS`` names ``pod_launcher`` and
``place``; nothing else outside imports a module of this room but the job file ``spec``. ``names``,
``pod_template``, ``objects``, ``pserver_objects``, ``pod_exit``, ``worker_pods`` and ``job_events``
decide from values and never call; ``api`` alone talks to Kubernetes. Pods run ``master``,
``scheduled_run`` and, when a server ends, ``server_stop``. A call of the API that is refused or not
answered is a ``KubernetesError``, also where a function does not say so.
"""
