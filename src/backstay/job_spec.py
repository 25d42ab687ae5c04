"""What a training job is: its data, model, mode and limits, checked when it is made.

Imports ``backstay.errors`` only; reads nothing and does no I/O.
"""
