"""The tables of the cluster: which there are, how one is made, how its settings change."""
