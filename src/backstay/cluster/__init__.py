"""What any process asks of a cluster's servers over the control plane.

Where slots are, which tables there are, which checkpoints. Rows never pass here: the data plane
moves them. Imports :mod:`backstay.rpc` and the records of :mod:`backstay.consensus`.
"""
