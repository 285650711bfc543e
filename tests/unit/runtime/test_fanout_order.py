"""Who takes files from whom."""

from __future__ import annotations

import pytest
from ansible_collections.ironrack.vllm.plugins.filter.fanout_sources import FilterModule
from ansible_collections.ironrack.vllm.plugins.plugin_utils.runtime import fanout

NODES = [f"n{number}" for number in range(1, 9)]
ADDRESSES = {name: f"10.77.1.{number}" for number, name in enumerate(NODES, 11)}


def hosts(found):
    return [int(url.split(":")[1].rsplit(".", 1)[1]) - 10 for url in found["sources"]]


def of(host, nodes=NODES[1:], builder="n1", addresses=ADDRESSES):
    return fanout.sources(nodes, host, builder, addresses, 8790)


def test_each_node_takes_from_the_one_before_it_and_the_builder_is_last():
    assert of("n2") == {"sources": ["http://10.77.1.11:8790/"], "serve": True, "starve": 33}
    assert hosts(of("n3")) == [2, 1]
    assert hosts(of("n4")) == [3, 2, 1]
    assert hosts(of("n8")) == [7, 6, 1]
    assert [of(name)["serve"] for name in NODES] == [True] * 7 + [False]


def test_no_node_is_the_first_choice_of_two():
    first = [hosts(of(name))[0] for name in NODES[1:]]
    assert sorted(first) == list(range(1, 8))


def test_every_chain_ends_at_the_builder():
    """Nobody waits in a circle: all sources of a node stand before it."""
    for place, name in enumerate(NODES[1:], 2):
        assert all(source < place for source in hosts(of(name)))
        assert hosts(of(name))[-1] == 1


def test_the_nodes_behind_a_gap_wait_longer_one_after_the_other():
    waits = [of(name)["starve"] for name in NODES]
    assert waits == sorted(set(waits))


def test_the_builder_takes_from_nobody():
    assert of("n1")["sources"] == []
    assert of("n1", nodes=["n1"]) == {"sources": [], "serve": False, "starve": 30}
    assert hosts(of("n3", nodes=["n1", "n2", "n3"])) == [2, 1], "it may stand among the others"


def test_a_builder_in_the_middle_comes_first():
    assert hosts(of("n1", nodes=["n1", "n2", "n4"], builder="n4")) == [4]
    assert hosts(of("n2", nodes=["n1", "n2", "n4"], builder="n4")) == [1, 4]


def test_a_limit_of_one_node():
    assert of("n5", nodes=["n5"]) == {"sources": ["http://10.77.1.11:8790/"], "serve": False, "starve": 33}
    assert of("n5", nodes=[])["sources"] == ["http://10.77.1.11:8790/"], "one that has it and is asked nevertheless"


def test_ipv6():
    assert of("n2", addresses={"n1": "fd00::1", "n2": "fd00::2"})["sources"] == ["http://[fd00::1]:8790/"]


def test_a_node_without_an_address_is_named():
    with pytest.raises(fanout.FanoutInputError, match=r"cluster_address = \(not set\) \(n2\): n3 takes files from"):
        of("n3", addresses={**ADDRESSES, "n2": ""})


def test_the_filter_turns_the_error_into_one_of_ansible():
    from ansible.errors import AnsibleFilterError  # noqa: PLC0415

    shim = FilterModule().filters()["fanout_sources"]
    assert shim(["n2"], "n2", "n1", ADDRESSES, "8790") == of("n2", nodes=["n2"])
    with pytest.raises(AnsibleFilterError, match="cluster_address"):
        shim(["n2"], "n2", "n1", {}, 8790)
