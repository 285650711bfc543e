# SPDX-License-Identifier: Apache-2.0
"""The one error of this package."""

from __future__ import annotations


class StackError(ValueError):
    """The input cannot be read at all. What is readable and wrong is told in the answer's problems instead."""
