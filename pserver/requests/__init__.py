"""What operators ask a node for: each request is checked here and written as one record.

The controller and the nodes carry out what the record says; nothing here waits for them.
"""
