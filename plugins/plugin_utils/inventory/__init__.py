"""Turns an inventory into a checked plan of the cluster: pure Python, standard library only, no Ansible."""
