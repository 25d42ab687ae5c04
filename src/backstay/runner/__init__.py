"""Runs jobs with the processes of this machine, from the servers to the summary.

The command (``backstay.cli``) and the Python calls (``backstay.jobs_api``) stand on it. Starts the
servers of a job's own, its job master and its workers, and keeps its log folder. Never imports
``backstay.cli``.
"""
