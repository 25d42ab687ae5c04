"""The events of a job, one module for each kind; ``engine.py`` lists them.

Each module has the methods that take its events, over the state in ``core.py``. No module here
imports another one.
"""
