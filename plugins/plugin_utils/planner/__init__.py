"""Decides how a model is served: pure Python, standard library only, no Ansible."""
