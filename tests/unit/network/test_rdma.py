"""Whose adapters write to whose, and the verdict: each fault on simulated nodes, with perftest's own words."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network import rdma
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network.probe import judge
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network.probe_html import render

RETRY = "Completion with error at client; Failed status 12: wr_id 0 syndrom 0x81; scnt=128, ccnt=0"
PCI = {"gt_s": 32.0, "width": 16.0, "max_gt_s": 32.0, "max_width": 16.0}


def plan(*names: str) -> dict[str, Any]:
    nodes = {
        name: {"address": f"10.77.1.{number}", "groups": ["ironrack_runtime"], "interface": "eth1"}
        for number, name in enumerate(names, 11)
    }
    return {"nodes": nodes, "instances": {}, "hosts": {}, "site": {}, "ray": None}


def port(number: int, **more: Any) -> dict[str, Any]:
    known = {"device": f"mlx5_{number}", "port": 1, "link_layer": "InfiniBand", "state": "ACTIVE", "rate_gbit": 400.0}
    return {**known, "interfaces": [], "bridges": [], **more}


def facts(count: int = 2, **more: Any) -> dict[str, Any]:
    return {"gpus": [], "nics": [], "rdma": [port(number, **more) for number in range(count)]}


def asked(the_plan: dict[str, Any], *, kind: str = "infiniband", **more: Any) -> dict[str, dict[str, Any]]:
    names = list(the_plan["nodes"])
    given = {
        "listeners": {name: {"random": [50001, 50002, 50003], "held": [], "busy": []} for name in names},
        "facts": {name: facts() for name in names},
        "types": dict.fromkeys(names, kind),
        "hcas": {},
        **more,
    }
    return rdma.meetings(the_plan, **given)


Change = Callable[[str, str, dict[str, Any]], None]


def results(the_asked: dict[str, dict[str, Any]], change: Change | None = None) -> dict[str, Any]:
    """What rdma_check returns where all is well, and what is changed in each node's view of each rail."""
    found: dict[str, Any] = {}
    for name, told in the_asked.items():
        runs = []
        for meeting in told["meetings"]:
            here = meeting["nodes"].index(name)
            peer = meeting["nodes"][1 - here]
            rails = []
            for rail in meeting["rails"]:
                entry = {"rail": rail["rail"], "device": rail["devices"][here], "port": 1, "error": None}
                entry |= {"peer_error": None, "counters": {}, "gbit_s": 391.0, "mtu": 4096, "link": "IB"}
                if change:
                    change(name, peer, entry)
                rails.append(entry)
            runs.append({"peer": peer, "why": None, "rails": rails})
        devices = {f"mlx5_{number}": dict(PCI) for number in range(8)}
        found[name] = {"tested": True, "why": None, "version": "6.06", "devices": devices, "runs": runs}
    return found


def verdict(
    the_plan: dict[str, Any], the_asked: dict[str, Any], the_results: dict[str, Any], mode: str = "full"
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    probes = {
        name: {"peers": {other: {} for other in the_plan["nodes"] if other != name}} for name in the_plan["nodes"]
    }
    told = {"rdma": the_results, "rdma_asked": the_asked}
    report = judge(probes, the_plan, {"mode": mode}, results=told)
    check = next(check for check in report["checks"] if check["id"] == "net_rdma")
    return check, [finding for finding in report["findings"] if finding["check"] == "net_rdma"], report


def judged(change: Change | None = None, names: str = "n1 n2 n3 n4", **more: Any) -> list[dict[str, Any]]:
    the_plan = plan(*names.split())
    the_asked = asked(the_plan, **more)
    return verdict(the_plan, the_asked, results(the_asked, change))[1]


def only(*arguments: Any, **more: Any) -> dict[str, Any]:
    (finding,) = judged(*arguments, **more)
    return finding


# --- who with whom ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 8])
def test_all_pairs_of_a_few_nodes_in_as_few_rounds_as_can_be(count: int) -> None:
    the_plan = plan(*(f"n{number}" for number in range(1, count + 1)))
    found = asked(the_plan)
    every = {(each["round"], *each["nodes"]) for told in found.values() for each in told["meetings"]}
    assert {frozenset(entry[1:]) for entry in every} == {frozenset(pair) for pair in itertools.combinations(found, 2)}
    assert len(every) == count * (count - 1) // 2
    assert max(entry[0] for entry in every) == (count - 1 if count % 2 == 0 else count)
    for told in found.values():
        rounds = [each["round"] for each in told["meetings"]]
        assert rounds == sorted(set(rounds))


def test_many_nodes_each_meet_some() -> None:
    the_plan = plan(*(f"n{number}" for number in range(1, 65)))
    found = asked(the_plan)
    rounds = {name: [each["round"] for each in told["meetings"]] for name, told in found.items()}
    assert all(numbers == sorted(set(numbers)) for numbers in rounds.values())
    assert {len(numbers) for numbers in rounds.values()} == {11}
    assert max(map(max, rounds.values())) <= 16


def test_a_meeting_says_all_that_the_module_needs() -> None:
    the_plan = plan("n1", "n2")
    slower = {"n1": facts(), "n2": facts(3, rate_gbit=200.0)}
    (meeting,) = asked(the_plan, facts=slower, fraction=0.9)["n1"]["meetings"]
    assert meeting == {
        "nodes": ["n1", "n2"],
        "addresses": ["10.77.1.11", "10.77.1.12"],
        "port": 50002,
        "round": 1,
        "rails": [
            {"rail": 0, "devices": ["mlx5_0", "mlx5_0"], "ports": [1, 1], "wanted_gbit": 180.0},
            {"rail": 1, "devices": ["mlx5_1", "mlx5_1"], "ports": [1, 1], "wanted_gbit": 180.0},
        ],
    }


def test_only_nodes_with_the_same_fabric_meet() -> None:
    the_plan = plan("n1", "n2", "n3", "n4", "n5")
    roce = facts(link_layer="Ethernet")
    found = asked(
        the_plan,
        facts={"n1": facts(), "n2": roce, "n3": facts(), "n4": roce, "n5": {}},
        types={"n1": "infiniband", "n2": "roce", "n3": "infiniband", "n4": "roce", "n5": "tcp"},
    )
    assert [[meeting["nodes"] for meeting in told["meetings"]] for told in found.values()] == [
        [["n1", "n3"]],
        [["n2", "n4"]],
        [["n1", "n3"]],
        [["n2", "n4"]],
        [],
    ]
    assert found["n5"]["why"] is None


def test_devices_of_the_inventory_in_its_order() -> None:
    the_plan = plan("n1", "n2")
    found = asked(
        the_plan, facts=dict.fromkeys(("n1", "n2"), facts(4)), hcas={"n1": ["mlx5_3:1", "mlx5_1"], "n2": ["mlx5_0"]}
    )
    assert [rail["devices"] for rail in found["n1"]["meetings"][0]["rails"]] == [["mlx5_3", "mlx5_0"]]


def test_time_is_enough_for_each_rail_alone() -> None:
    the_plan = plan("n1", "n2", "n3")
    eight = dict.fromkeys(the_plan["nodes"], facts(8))
    told = asked(the_plan, facts=eight, seconds=5.4)["n1"]
    assert (told["seconds"], asked(the_plan, seconds=0.5)["n1"]["seconds"]) == (5, 4)
    assert told["timeout"] >= 2 * 9 * (5 + 5)
    assert told["limit"] >= 3 * told["timeout"]


# --- the verdict -----------------------------------------------------------------------------------------------------


def test_all_is_well() -> None:
    the_plan = plan("n1", "n2", "n3")
    the_asked = asked(the_plan)

    def change(name: str, peer: str, rail: dict[str, Any]) -> None:
        if (name, peer, rail["rail"]) == ("n3", "n1", 1):
            rail["gbit_s"] = 372.0

    check, findings, report = verdict(the_plan, the_asked, results(the_asked, change))
    assert findings == []
    assert (check["status"], check["measured"]) == (
        "pass",
        "12 rails and directions, the slowest: n3 to n1, rail 1 (mlx5_1:1): 46.5 of 50.0 GB/s",
    )
    assert report["matrix"]["n3"]["n1"]["rails_gb_s"] == [48.88, 46.5]
    assert report["worst"]["rdma_gb_s"] == {"pair": ["n3", "n1"], "value": 46.5}
    assert "slowest rail: 46.5 GB/s, n3 to n1" in report["table"]
    page = render(report)
    assert "<h2>RDMA (GB/s)</h2>" in page and "rail 1: 46.5 GB/s" in page


def test_where_there_is_no_rdma_nothing_is_said_of_it() -> None:
    the_plan = plan("n1", "n2")
    check, findings, report = verdict(the_plan, asked(the_plan, kind="tcp"), {})
    assert (check["status"], findings) == ("skip", [])
    assert check["measured"] == "not tested: fabric_type is neither infiniband nor roce"
    assert "rdma_gb_s" not in report["worst"]
    assert (
        verdict(the_plan, asked(the_plan), {}, "quick")[0]["measured"] == "not tested: preflight_network=full tests it"
    )


def test_a_port_that_is_down_is_told_of_its_node() -> None:
    the_plan = plan("n1", "n2", "n3")
    found = {name: facts() for name in the_plan["nodes"]}
    found["n2"] = facts(state="DOWN")
    the_asked = asked(the_plan, facts=found)
    _, (finding,), _ = verdict(the_plan, the_asked, results(the_asked))
    assert (finding["status"], finding["nodes"]) == ("fail", ["n2"])
    assert "n2 has no active RDMA port" in finding["measured"]


def test_without_perftest_the_remedy_is_named() -> None:
    the_plan = plan("n1", "n2", "n3")
    the_asked = asked(the_plan)
    told = results(the_asked)
    why = "ib_write_bw cannot be run (No such file or directory)"
    for name in told:
        for run in told[name]["runs"]:
            if "n2" in (name, run["peer"]):
                run |= {"why": f"n2: {why}", "rails": []}
    told["n2"]["why"] = why
    _, (finding,), _ = verdict(the_plan, the_asked, told)
    assert (finding["status"], finding["nodes"], finding["measured"]) == ("warn", ["n2"], why)
    assert "perftest" in finding["cause"] and "playbooks/network.yml" in finding["remedy"]


def test_engines_that_serve_are_no_fault() -> None:
    the_plan = plan("n1", "n2")
    the_asked = asked(the_plan)
    told = results(the_asked)
    for entry in told.values():
        entry["why"] = "adapters are in use by vllm@llm"
        entry["runs"] = [{**run, "why": entry["why"], "rails": []} for run in entry["runs"]]
    check, findings, _ = verdict(the_plan, the_asked, told)
    assert (check["status"], check["measured"], findings) == ("skip", "not tested: adapters are in use by vllm@llm", [])


@pytest.mark.parametrize(
    ("words", "cause", "remedy"),
    [
        ("there is no mlx5_1:1", "adapter is gone", "lspci"),
        ("Did not detect devices; Unable to find the Infiniband/RoCE device", "adapter is gone", "lspci"),
        ("mlx5_1:1 is not active (2: INIT)", "link is not up", "subnet manager"),
        ("Port number 1 state is Down; Couldn't set the link layer", "link is not up", "ibstat"),
        (
            "Couldn't allocate MR; failed to create mr; Couldn't create IB resources",
            "locked memory",
            "DefaultLimitMEMLOCK=infinity",
        ),
        ("Found Incompatibility issue with GID types.", "different RoCE versions", "show_gids"),
        ("Unable to set up socket connection", "index (GID) does not exist", "NCCL_IB_GID_INDEX"),
        ("Failed to modify QP 264 to RTR; Unable to Connect the HCA's through the link", "refuses", "ping -I"),
        (RETRY, "never answers", "PFC"),
        ("Failed status 10: wr_id 0 syndrom 0x88", "refuses the data", "active_mtu"),
        ("Couldn't connect to 10.77.1.12:40001; Unable to init the socket connection", "over TCP", "net_connect"),
        ("ib_write_bw: unrecognized option '--tclass=106'", "does not know", "install perftest"),
        ("no end in time", "other end stopped", "/run/ironrack/rdma"),
        ("something new", "own words", "/run/ironrack/rdma"),
    ],
)
def test_words_have_a_cause(words: str, cause: str, remedy: str) -> None:
    told = rdma.explain(words)
    assert cause in told[0] and remedy in told[1]


def test_one_rail_of_one_node_is_one_finding() -> None:
    def change(name: str, peer: str, rail: dict[str, Any]) -> None:
        if rail["rail"] == 1 and "n3" in (name, peer):
            rail |= {"gbit_s": None, "error": RETRY}

    finding = only(change)
    assert (finding["status"], finding["nodes"]) == ("fail", ["n3"])
    assert finding["measured"].startswith("rail 1 (mlx5_1:1 of n3): nothing goes from n3 to n1, n2, n4 or back: ")
    assert len(finding["pairs"]) == 6
    assert "cable is in another rail's switch" in finding["cause"]


def test_of_two_nodes_none_is_blamed() -> None:
    def change(name: str, peer: str, rail: dict[str, Any]) -> None:
        if rail["rail"] == 1:
            rail |= {"gbit_s": None, "error": RETRY}

    finding = only(change, "n1 n2")
    assert (finding["nodes"], finding["pairs"]) == (["n1", "n2"], [["n1", "n2"], ["n2", "n1"]])


def test_swapped_cables_are_named() -> None:
    def change(name: str, peer: str, rail: dict[str, Any]) -> None:
        if rail["rail"] in (2, 5) and "n3" in (name, peer):
            rail |= {"gbit_s": None, "error": RETRY}

    finding = only(change, facts={name: facts(8) for name in ("n1", "n2", "n3", "n4")})
    assert finding["cause"].startswith("the cables of rails 2 and 5 of n3 are swapped")
    assert finding["nodes"] == ["n3"]


def test_who_knows_why_is_heard() -> None:
    def change(name: str, peer: str, rail: dict[str, Any]) -> None:
        if rail["rail"] == 0 and {name, peer} == {"n1", "n2"}:
            rail |= {"gbit_s": None, "error": "no end in time", "peer_error": None}
            if name == "n2":
                rail["error"] = "Couldn't allocate MR; failed to create mr"

    finding = only(change)
    assert "locked memory" in finding["cause"]
    assert finding["measured"] == "n2 (mlx5_0:1): Couldn't allocate MR; failed to create mr"
    assert finding["nodes"] == ["n2"]


def test_what_is_wrong_everywhere_is_told_once() -> None:
    def gone(name: str, peer: str, rail: dict[str, Any]) -> None:
        rail |= {"gbit_s": None, "peer_error": "Did not detect devices"}

    finding = only(gone)
    assert finding["nodes"] == ["n1", "n2", "n3", "n4"]
    assert finding["measured"].endswith("n2 (mlx5_0:1, mlx5_1:1): Did not detect devices; and 2 more")
    assert len(finding["pairs"]) == 12

    def lost(name: str, peer: str, rail: dict[str, Any]) -> None:
        rail |= {"gbit_s": None, "error": RETRY}

    finding = only(lost)
    assert (finding["nodes"], len(finding["pairs"])) == (["n1", "n2", "n3", "n4"], 12)
    the_plan = plan("n1", "n2")
    the_asked = asked(the_plan)
    assert "net_rdma: not tested" not in verdict(the_plan, the_asked, results(the_asked, lost))[2]["table"]


def slow(gbit: float, **more: Any) -> Change:
    """Rail 1 of n3 is slow with everybody."""

    def change(name: str, peer: str, rail: dict[str, Any]) -> None:
        if rail["rail"] == 1 and "n3" in (name, peer):
            rail |= {"gbit_s": gbit, **more}

    return change


def test_a_slow_rail_is_told_with_its_figures() -> None:
    finding = only(slow(96.0, alone_gbit_s=97.0))
    assert (finding["status"], finding["nodes"]) == ("fail", ["n3"])
    assert "n3 to n1 rail 1 12.0 GB/s (alone 12.1)" in finding["measured"]
    assert finding["expected"] == "at least 45.0 GB/s (0.9 of the ports' 400 Gbit/s)"
    assert "cable, transceiver or switch port of n3" in finding["cause"]


def test_what_just_suffices_is_no_fault() -> None:
    assert judged(slow(360.0)) == []
    assert len(judged(slow(359.0))) == 1


def test_without_a_known_rate_figures_are_told_only() -> None:
    the_plan = plan("n1", "n2")
    the_asked = asked(the_plan, facts={name: facts(rate_gbit=None) for name in the_plan["nodes"]})
    check, findings, _ = verdict(the_plan, the_asked, results(the_asked))
    assert findings == [] and "of 4 the port's speed is not known" in check["measured"]


def test_a_narrow_slot_is_the_cause() -> None:
    the_plan = plan("n1", "n2", "n3")
    the_asked = asked(the_plan)
    told = results(the_asked, slow(100.0))
    told["n3"]["devices"]["mlx5_1"] |= {"gt_s": 16.0, "width": 8.0}
    _, (finding,), _ = verdict(the_plan, the_asked, told)
    assert "mlx5_1:1 on n3 came up with 16 GT/s x8 of 32 GT/s x16" in finding["cause"]
    # Of another device, it is none.
    told = results(the_asked, slow(100.0))
    told["n3"]["devices"]["mlx5_0"] |= {"gt_s": 16.0, "width": 8.0}
    assert "GT/s" not in verdict(the_plan, the_asked, told)[1][0]["cause"]


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        (
            {"mtu": 1024, "link": "Ethernet"},
            "packets of RDMA carry 1024 bytes instead of 4096: the MTU of the interfaces",
        ),
        ({"mtu": 2048}, "a port or a switch limits them"),
        ({"counters": {"symbol_error": 12}}, "packets are lost or damaged (n"),
        ({"counters": {"out_of_sequence": 12}, "link": "Ethernet"}, "without PFC and ECN"),
        ({"counters": {"np_ecn_marked_roce_packets": 12}, "link": "Ethernet"}, "switches mark packets (ECN)"),
        ({"alone_gbit_s": 391.0}, "fast alone and slow with the others"),
        ({"alone_gbit_s": 201.0}, "cable, transceiver or switch port of n3"),
    ],
)
def test_evidence_decides_on_the_cause(more: dict[str, Any], cause: str) -> None:
    assert cause in only(slow(200.0, **more))["cause"]


def test_slow_pairs_without_an_odd_node() -> None:
    def change(name: str, peer: str, rail: dict[str, Any]) -> None:
        if {name, peer} == {"n1", "n3"}:
            rail["gbit_s"] = 100.0

    finding = only(change)
    assert finding["nodes"] == ["n1", "n3"]
    assert finding["measured"].startswith("rails 0 and 1 (")
    assert "between switches" in finding["cause"]


def test_fewer_rails_are_told() -> None:
    the_facts = {name: facts(8) for name in ("n1", "n2", "n3", "n4")} | {"n3": facts(7)}
    finding = only(facts=the_facts)
    assert (finding["status"], finding["nodes"], finding["measured"]) == (
        "warn",
        ["n3"],
        "n3 has 7 rails, the others 8",
    )
