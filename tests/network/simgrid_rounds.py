"""Rounds of messages in SimGrid 3.32: a case in JSON on standard input, the seconds of each round on standard output.

Run by Debian's own Python, for which its package python3-simgrid is built; imports nothing of ours. Star, torus and
fat tree are SimGrid's zones with SimGrid's routing; `routes` is a network of which every route is given.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

OPTIONS = [
    "--log=xbt_cfg.thres:warning",
    "--cfg=network/model:CM02",
    "--cfg=network/TCP-gamma:0",
    "--cfg=network/crosstraffic:0",
]


def main():
    case = json.load(sys.stdin)
    told = os.dup(1)
    os.dup2(2, 1)  # what SimGrid says itself
    sg = importlib.import_module("simgrid")
    engine = sg.Engine(["rounds", *OPTIONS])
    zones = {"star": star, "torus": torus, "fat tree": fat_tree, "routes": routes}
    zones[case["network"]](sg, case).seal()
    seconds = []
    sg.Actor.create("rounds", sg.Host.by_name("h0"), every_round, sg, case["rounds"], seconds)
    engine.run()
    os.write(told, json.dumps(seconds).encode())


def every_round(sg, rounds, seconds):
    for messages in rounds:
        begun = sg.Engine.clock
        hosts = [(sg.Host.by_name(f"h{a}"), sg.Host.by_name(f"h{b}"), int(size)) for a, b, size in messages]
        sg.Comm.wait_all([sg.Comm.sendto_async(*one) for one in hosts])
        seconds.append(sg.Engine.clock - begun)


def star(sg, case):
    zone = sg.NetZone.create_star_zone("star")
    for number in range(case["hosts"]):
        host = zone.create_host(f"h{number}", 1e9)
        link = zone.create_split_duplex_link(f"l{number}", case["bytes_per_s"]).set_latency(case["latency_s"])
        zone.add_route(host.netpoint, None, None, None, [sg.LinkInRoute(link, sg.LinkInRoute.UP)], True)
    return zone


def torus(sg, case):
    return sg.NetZone.create_torus_zone("torus", None, case["dims"], hosts_of(sg), *kind_of_link(sg, case))


def fat_tree(sg, case):
    shape = sg.FatTreeParams(len(case["down"]), case["down"], [1, *case["up"]], [1] * len(case["down"]))
    return sg.NetZone.create_fatTree_zone("tree", None, shape, hosts_of(sg), *kind_of_link(sg, case))


def hosts_of(sg):
    return sg.ClusterCallbacks(
        lambda zone, _, number: (zone.create_host(f"h{number}", 1e9).seal().netpoint, None), None, None
    )


def kind_of_link(sg, case):
    return case["bytes_per_s"], case["latency_s"], sg.Link.SharingPolicy.SPLITDUPLEX


def routes(sg, case):
    zone = sg.NetZone.create_full_zone("routes")
    hosts = [zone.create_host(f"h{number}", 1e9) for number in range(case["hosts"])]
    links = {}
    for source, target, path in case["routes"]:
        for one in path:
            if one not in links:
                links[one] = zone.create_link(f"l{one}", case["bytes_per_s"]).set_latency(case["latency_s"]).seal()
        way = [sg.LinkInRoute(links[one]) for one in path]
        zone.add_route(hosts[source].netpoint, hosts[target].netpoint, None, None, way, False)
    return zone


if __name__ == "__main__":
    main()
