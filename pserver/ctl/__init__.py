"""``pserverctl``: asks a running cluster, and tells it what to do; a module per family of commands.

``cli`` puts the commands together, ``asking`` finds the cluster and turns errors into exit codes,
``showing`` prints for people. Nothing else imports this package.
"""
