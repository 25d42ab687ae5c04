"""What the commands find out about a job before anything of it is started.

The check before a job begins and ``--dry-run``. Both load the user's model file, so a process of
its own runs them. May import the trainer, to try the model; never the job master or a server.
"""
