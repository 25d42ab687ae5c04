"""Running exports: their records, and how the controller writes them.

May import the rooms of checkpoints, membership, metrics and peers.
"""
