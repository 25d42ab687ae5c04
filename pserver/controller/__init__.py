"""The controller's decisions: from the records in the coordination store to a new routing table.

Pure: values in, values out; no clock, socket, thread, randomness or store. The node with the
election key reads the records, calls ``decide`` and writes what it returns, in a transaction
that compares the election key and the routing record with what was read. Imports the records of
``backstay.consensus`` and numpy.
"""

from backstay.pserver.controller.decide import decide
from backstay.pserver.controller.inputs import Absences, ClusterRecords, Decision, StepSizes, living
from backstay.pserver.controller.plans import PlanWait, choose_leaving, leaving_of
from backstay.pserver.controller.repair import follow_repair, missing_copies

__all__ = [
    "Absences",
    "ClusterRecords",
    "Decision",
    "PlanWait",
    "StepSizes",
    "choose_leaving",
    "decide",
    "follow_repair",
    "leaving_of",
    "living",
    "missing_copies",
]
