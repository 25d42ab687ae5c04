"""What programs outside the cluster ask its nodes: ``pserverctl`` and ``ClusterResizing``.

The modules here call gRPC services. They never read the coordination store.
"""
