"""What checkpoints and running exports have in common: when a snapshot is due, and its writing.

``writing`` is what every node does with the slots that it masters; ``writer`` has all of them
written and puts the snapshot together; ``due`` and ``pushes`` say when the next one is to come.
What differs between the two is decided above, in ``checkpoints`` and ``exports``. May import
``backstay.checkpoint``, ``backstay.consensus`` and the calls to other nodes.
"""
