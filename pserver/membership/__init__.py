"""A node's place in its cluster: its lease and records, its peers, and what it leaves behind.

The modules here do I/O: they watch and write records of the coordination store. They never decide
about the routing table.
"""
