# SPDX-License-Identifier: Apache-2.0
"""Redirects that take no secret along: urllib hands a token or a password on to wherever a server sends it."""

from __future__ import annotations

import urllib.parse
import urllib.request

PORTS = {"http": 80, "https": 443}


def _origin(url):
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or PORTS.get(parts.scheme)


def same_origin(one, other):
    """Whether what may know the secrets of one URL may know them at the other, too."""
    try:
        (scheme, *place), (other_scheme, *other_place) = _origin(one), _origin(other)
    except ValueError:  # a port that is none
        return False
    if (scheme, other_scheme) == ("http", "https") and place[0] == other_place[0]:
        return (place[1], other_place[1]) == (PORTS["http"], PORTS["https"])
    return [scheme, *place] == [other_scheme, *other_place]


class Handler(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, request, *answer):
        following = super().redirect_request(request, *answer)
        if following is not None:
            # The handler of proxies sets its own again, where the next place is behind the proxy.
            following.remove_header("Proxy-authorization")
            if not same_origin(request.full_url, following.full_url):
                following.remove_header("Authorization")
        return following
