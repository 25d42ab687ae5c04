"""PyTorch adapter: trained embeddings in a plain PyTorch model.

Only this package imports torch, and it imports nothing of the servers.
"""
