"""What a job is to do, and in which order: its rounds, its tasks, and when it ends.

Decided from arguments alone, so that a job with a job master and workers and one in a single
process (``--local``) run the same schedule. No clock, no thread, no socket, no file; imports numpy,
``backstay.job_spec``, ``backstay.errors`` and ``backstay.json_record``.
"""
