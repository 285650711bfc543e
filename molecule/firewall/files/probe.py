"""What the scenario's nodes try on each other. Python 3.9 and its standard library: it runs on the nodes.

probe.py listen       listens on TCP, and answers UDP, on ports that a firewall has to keep apart
probe.py source       sends a line every 0.1 s to whoever connects to port 7000
probe.py download     reads them from the node named in DOWNLOAD and keeps count in /run/download
probe.py ask < JSON   tries ports from addresses of this node: [{name, source, target, tcp, udp}], tcp and udp the ports
                      that have to answer; `all: true` tries all 65535 of TCP. Ends with 1 and the differences when
                      other ports do.
"""

import concurrent.futures
import errno
import json
import os
import resource
import selectors
import socket
import sys
import time
from pathlib import Path

TCP = (5000, 6379, 8000, 8080, 8265, 9000, 9100, 9400, 10001, 10150, 29501, 40000, 50123, 55555)
UDP = (123, 4791, 5353)
# Of sshd, and of the download that is open.
OTHERS = (22, 7000)
PATIENCE = 1.2
# Ten rounds of a whole range: nobody here is far away.
PATIENCE_WHOLE = 0.4
AT_ONCE = 7000


def listen():
    selector = selectors.DefaultSelector()
    for kind, ports in ((socket.SOCK_STREAM, TCP), (socket.SOCK_DGRAM, UDP)):
        for port in ports:
            server = socket.socket(socket.AF_INET6, kind)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            server.bind(("::", port))
            if kind == socket.SOCK_STREAM:
                server.listen(64)
            selector.register(server, selectors.EVENT_READ, kind)
    while True:
        for key, _ in selector.select():
            if key.data == socket.SOCK_STREAM:
                key.fileobj.accept()[0].close()
            else:
                data, peer = key.fileobj.recvfrom(100)
                key.fileobj.sendto(data, peer)


def source():
    server = socket.socket(socket.AF_INET)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("", 7000))
    server.listen(1)
    peer = server.accept()[0]
    while True:
        peer.sendall(b"x" * 99 + b"\n")
        time.sleep(0.1)


def download():
    connection = socket.create_connection((os.environ["DOWNLOAD"], 7000))
    count = 0
    while True:
        data = connection.recv(4096)
        if not data:
            raise SystemExit("the connection was closed")
        count += len(data)
        Path("/run/download").write_text(f"{count}\n", encoding="utf-8")


def family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def tried_tcp(source_address, target, ports, patience):
    """Ports that let a connection in: those that refuse it have seen it, too."""
    waiting, reached = list(reversed(ports)), set()
    selector, open_ = selectors.DefaultSelector(), {}
    while waiting or open_:
        while waiting and len(open_) < AT_ONCE:
            port = waiting.pop()
            one = socket.socket(family(target))
            one.setblocking(False)
            one.bind((source_address, 0))
            code = one.connect_ex((target, port))
            if code in (0, errno.ECONNREFUSED):
                reached.add(port)
            if code == errno.EINPROGRESS:
                selector.register(one, selectors.EVENT_WRITE)
                open_[one] = (port, time.monotonic() + patience)
            else:
                one.close()
        for key, _ in selector.select(0.1):
            one = key.fileobj
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (0, errno.ECONNREFUSED):
                reached.add(open_[one][0])
            selector.unregister(one)
            del open_[one]
            one.close()
        now = time.monotonic()
        for one in [one for one, (_, end) in open_.items() if end < now]:
            selector.unregister(one)
            del open_[one]
            one.close()
    return reached


def tried_udp(source_address, target):
    reached = set()
    sockets = {}
    for port in UDP:
        one = socket.socket(family(target), socket.SOCK_DGRAM)
        one.bind((source_address, 0))
        one.connect((target, port))
        one.send(b"?")
        sockets[one] = port
    end = time.monotonic() + PATIENCE
    selector = selectors.DefaultSelector()
    for one in sockets:
        selector.register(one, selectors.EVENT_READ)
    while time.monotonic() < end and len(reached) < len(UDP):
        for key, _ in selector.select(0.1):
            # Something came back: an answer, or a refusal.
            reached.add(sockets[key.fileobj])
            selector.unregister(key.fileobj)
    return reached


def tried(one):
    """What is wrong with one try."""
    ports, patience = (range(1, 65536), PATIENCE_WHOLE) if one.get("all") else (TCP + OTHERS, PATIENCE)
    found = {
        "tcp": tried_tcp(one["source"], one["target"], ports, patience),
        "udp": tried_udp(one["source"], one["target"]),
    }
    for protocol, reached in found.items():
        wanted = set(one[protocol])
        shown = f"{one['name']}, {protocol} from {one['source']} to {one['target']}"
        if reached - wanted:
            yield f"{shown}: {sorted(reached - wanted)[:20]} let it in, and must not"
        if wanted - reached:
            yield f"{shown}: {sorted(wanted - reached)} did not let it in, and must"


def ask():
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    tries = json.load(sys.stdin)
    with concurrent.futures.ThreadPoolExecutor(len(tries)) as pool:
        wrong = [line for lines in pool.map(lambda one: list(tried(one)), tries) for line in lines]
    print("\n".join(wrong) or "as wanted")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit({"listen": listen, "source": source, "download": download, "ask": ask}[sys.argv[1]]())
