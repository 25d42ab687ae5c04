"""What is asked of a user's model file, and what a framework answers for it."""
