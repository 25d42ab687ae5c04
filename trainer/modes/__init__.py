"""How workers keep step with each other: what stands between any program and its client."""
