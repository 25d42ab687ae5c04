"""What the job master decides, from its arguments alone: no clock, no thread, no socket, no file.

Time comes in as seconds of one monotonic clock of the caller's, random orders come from seeds.
Imports numpy, ``backstay.schedule``, ``backstay.errors`` and ``backstay.consensus.json_fields``;
never I/O.
"""
