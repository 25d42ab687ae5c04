"""The gRPC services of a node, one file per service.

Each turns messages into values, calls what does the work, and turns the result into a message.
"""
