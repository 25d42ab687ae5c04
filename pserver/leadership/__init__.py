"""What the node does that is elected controller: it carries out what ``controller`` decides.

``controller_host`` campaigns for leadership and writes the routing table. The decisions themselves
are pure and stand in ``backstay.pserver.controller``.
"""
