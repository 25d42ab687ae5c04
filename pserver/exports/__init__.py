"""Exports that go on: their records, and writing them, by the controller.

May import the rooms of checkpoints, membership, metrics and peers.
"""
