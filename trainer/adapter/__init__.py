"""What the adapters of Paddle and PyTorch share: sessions, lookups, dense layouts, pushes."""
