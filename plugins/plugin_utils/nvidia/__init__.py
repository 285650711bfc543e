# SPDX-License-Identifier: Apache-2.0
"""What the controller decides about NVIDIA's software on a host. Pure Python, no Ansible."""
