# SPDX-License-Identifier: Apache-2.0
"""What the controller decides about the runtime: which lock, which release. Pure Python, no Ansible."""
