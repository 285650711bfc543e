# SPDX-License-Identifier: Apache-2.0
"""Who takes files from whom: a chain in the order of the plan. No node's uplink is used more than a few times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Nodes before a node that it may take from. With two of them, one that fails costs the builder nothing.
NEAREST = 2
# Seconds that a node waits for one that is alive, but has nothing new. The nodes behind a gap wait a little longer
# each, so that the first of them closes it and the others stay where they are.
STARVE, STARVE_STEP = 30, 3


class FanoutInputError(ValueError):
    """Names what is missing for the fan-out, and the remedy."""


def base_url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}/" if ":" in address else f"http://{address}:{port}/"


def sources(
    nodes: Sequence[str], host: str, builder: str, addresses: Mapping[str, str | None], port: int
) -> dict[str, Any]:
    """Where a node takes files from, nearest first, and whether another one takes them from it.

    `nodes` are those that lack the files, in an order that is the same for all of them; the builder has them.
    """
    chain = [builder, *(node for node in dict.fromkeys(nodes) if node != builder)]
    if host not in chain:
        chain.append(host)
    place = chain.index(host)
    found = list(dict.fromkeys([*reversed(chain[max(0, place - NEAREST) : place]), *([builder] if place else [])]))
    missing = [node for node in found if not addresses.get(node)]
    if missing:
        raise FanoutInputError(
            f"cluster_address = (not set) ({', '.join(missing)}): {host} takes files from there -> set cluster_address"
            " or cluster_interface of that node"
        )
    return {
        "sources": [base_url(str(addresses[node]), port) for node in found],
        "serve": place < len(chain) - 1,
        "starve": STARVE + STARVE_STEP * place,
    }
