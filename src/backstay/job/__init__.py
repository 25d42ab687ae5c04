"""A job, as its job master, its workers and the commands all know it.

The model file and what it may define, the messages between a worker and the job master, and the
calls that reach the job master. The schedule of a job is in ``backstay.schedule``, its file in
``backstay.job_spec``. Imports the readers, the control plane's calls and the records of the
coordination store; never a worker, a job master or a framework.
"""
