"""The network between the nodes: who may reach what, and whether it does."""
