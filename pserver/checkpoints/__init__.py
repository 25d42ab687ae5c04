"""A node's part in checkpoints: writing its slots, loading them, and whole checkpoints on request.

``writing`` and ``loading`` are what every node does with the slots it masters; ``saving`` and
``restoring`` are what the node does that was asked for a checkpoint; ``schedule`` asks for them by
time and by pushes, on the controller. Rows go from the data plane to files and back; no Python
code touches one. May import ``backstay.checkpoint``, ``backstay.consensus`` and the node's modules.
"""
