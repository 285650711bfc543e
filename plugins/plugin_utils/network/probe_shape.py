"""Whether what a node measured can be read at all: one node's broken result must not cost the verdict on the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

# A key that ends with ! has to be there; others may be missing or null. * stands for any key.
_NUMBER = (int, float)
_ADDRESS = (str, dict)
_TEXTS = [str]
_NAME = {"resolves": [_ADDRESS]}
_ATTEMPT = {"port!": int, "kind!": str, "result!": str, "ms": _NUMBER, "answered_by": str, "errno": int, "error": str}
_PEER = {
    "tcp": [_ATTEMPT],
    "name": _NAME,
    "identity": str,
    "mac": str,
    "neighbour": str,
    "why": str,
    "route": {"dev": str, "src": str, "gateway": str, "error": str},
    "mtu": {"tried!": int, "largest": int},
    "clock": {"offset_s!": _NUMBER},
    "bandwidth": {"mbit_s": _NUMBER},
}
_PROBE = {
    "address": _ADDRESS,
    "interface": {
        "name": str,
        "mtu": int,
        "mac": str,
        "speed_mbit": int,
        "addresses": [_ADDRESS],
        "dad_failed": [_ADDRESS],
    },
    "addresses": [_ADDRESS],
    "hostname": _NAME,
    "routes": [{"dev": str, "gateway": str}],
    "duplicate": _TEXTS,
    "peers": {"*": _PEER},
}
# Beyond it, no figure of a network is meant, and arithmetic fails.
_MOST = 1e15


def fault(probe: Any, nodes: Collection[str]) -> str | None:
    """What is wrong with the result of net_probe, or null."""
    # Of many nodes nearly all are well: what exactly is wrong is looked for where something is.
    found = None if _WELL(probe) else _fault(probe, _PROBE, "")
    if found is None:
        strange = [name for name in probe.get("peers") or {} if name not in nodes]
        found = f"peers.{strange[0]} is no node of the plan" if strange else None
    return found


def _well(shape: Any) -> Callable[[Any], bool]:
    """Whether a value has the shape."""
    if isinstance(shape, dict) and "*" in shape:
        every = _well(shape["*"])
        return lambda value: isinstance(value, Mapping) and all(map(every, value.values()))
    if isinstance(shape, dict):
        wanted = [(key.rstrip("!"), key.endswith("!"), _well(inner)) for key, inner in shape.items()]

        def whole(value: Any) -> bool:
            if not isinstance(value, Mapping):
                return False
            for key, needed, inner in wanted:
                entry = value.get(key)
                if needed if entry is None else not inner(entry):
                    return False
            return True

        return whole
    if isinstance(shape, list):
        each = _well(shape[0])
        return lambda value: isinstance(value, list) and all(map(each, value))
    return lambda value: isinstance(value, shape) and (not isinstance(value, (int, float)) or abs(value) < _MOST)


_WELL = _well(_PROBE)


def _fault(value: Any, shape: Any, where: str) -> str | None:
    if isinstance(shape, dict):
        if not isinstance(value, Mapping):
            return _told(where, value)
        if "*" in shape:
            return _first((value[key], shape["*"], _below(where, key)) for key in value)
        wanted = [(key.rstrip("!"), key.endswith("!"), inner) for key, inner in shape.items()]
        missing = [key for key, needed, _ in wanted if needed and value.get(key) is None]
        if missing:
            return f"{_below(where, missing[0])} is missing"
        return _first((value[key], inner, _below(where, key)) for key, _, inner in wanted if value.get(key) is not None)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return _told(where, value)
        return _first((entry, shape[0], f"{where}[{place}]") for place, entry in enumerate(value))
    if not isinstance(value, shape) or (isinstance(value, (int, float)) and not abs(value) < _MOST):
        return _told(where, value)
    return None


def _first(parts: Any) -> str | None:
    return next((found for part in parts if (found := _fault(*part)) is not None), None)


def _below(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _told(where: str, value: Any) -> str:
    return f"{where or 'the result'} is {str(value)[:40]!r}, which cannot be"
