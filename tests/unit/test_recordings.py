"""The converter of recorded markets reads its sources as their authors wrote them."""

import gzip
import itertools
import json

from tests.recordings import counted, kept_running, priced, probed, runs

PLACES = [
    f"{n} GPU(s) of type {gpu} in zone {z}"
    for z in ("us-east-1b", "us-east-1c")
    for gpu in ("v100", "k80")
    for n in (1, 8)
]


def put(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_values_are_written_run_by_run():
    assert runs([0, 0, 0, 2, 0]) == "3x0 1x2 1x0"


def test_a_probe_says_that_a_launch_failed_not_that_machines_were_there(tmp_path):
    campaigns = ("2022-10-26T22-05", "2022-11-28T22-23", "2022-12-13T19-23")
    kinds = ("v100_1", "v100_8", "k80_1", "k80_8")
    for campaign, kind, zone in itertools.product(campaigns, kinds, ("us-west-2a", "us-west-2b")):
        failed = "0 1 1 0" if zone == "us-west-2a" else "1 1 1"
        lines = [f"{i},2022-10-26T22:{5 + 10 * i:02}:04.000Z,{said}" for i, said in enumerate(failed.split())]
        put(tmp_path / "skyspot-probe-logs" / campaign / f"{zone}_{kind}.txt", lines)
    found = dict(probed(tmp_path))
    assert sorted(found)[:2] == ["p2.8xlarge-2022-10", "p2.8xlarge-2022-11"]
    market = found["p3.16xlarge-2022-10"]
    assert (market["gpus"], market["tick_s"], market["started_at"]) == (8, 600, "2022-10-26T22:05:04+00:00")
    assert market["ticks"] == 3  # as long as the shorter of its zones
    assert market["zones"]["us-west-2a"] == {"nodes": "1x1 2x0", "usd_per_hour": "3x7.7846"}
    assert market["zones"]["us-west-2b"]["nodes"] == "3x0"


def test_a_priced_recording_keeps_the_price_of_each_zone(tmp_path):
    file = tmp_path / "p3.2xlarge-9zones-2023-avail-price" / "avail_price.csv.gz"
    file.parent.mkdir()
    with gzip.open(file, "wt", encoding="utf-8") as out:
        out.write("utc,us-east-1a_avail,us-west-2a_avail,us-east-1a_usd_per_h,us-west-2a_usd_per_h\n")
        out.write("2023-02-16T05:34:30,0,1,1.6703,0.9180\n2023-02-16T05:37:45,1,1,1.67,0.9180\n")
    ((name, market),) = priced(tmp_path)
    assert (name, market["prices_recorded"]) == ("p3.2xlarge-2023-02", True)
    assert market["zones"] == {
        "us-east-1a": {"nodes": "1x0 1x1", "usd_per_hour": "1x1.6703 1x1.6700"},
        "us-west-2a": {"nodes": "2x1", "usd_per_hour": "2x0.9180"},
    }


def test_a_machine_that_was_taken_and_came_again_at_once_was_taken_nevertheless(tmp_path):
    logs = tmp_path / "training-on-a-dime" / "logs"
    rounds = [
        [f"[2020-03-15T10:00:0{i}.000Z] Created instance i-{i} with {place}" for i, place in enumerate(PLACES)],
        ["[2020-03-15T10:10:00.000Z] Instance i-0 not running in zone us-east-1b"],
        ["[2020-03-15T10:10:01.000Z] Created instance i-9 with 1 GPU(s) of type v100 in zone us-east-1b"],
        [f"[2020-03-15T10:10:0{i}.000Z] Instance i-{i} running in zone {PLACES[i][-10:]}" for i in range(1, 7)],
        ["[2020-03-15T10:10:07.000Z] Instance with 8 GPU(s) of type k80 creation failed"],
        [f"[2020-03-15T10:20:0{i}.000Z] Instance i-{i} running in zone {PLACES[i][-10:]}" for i in range(8)],
    ]
    put(logs / "aws" / "availability" / "persistent_2020-03-15.out", itertools.chain(*rounds))
    for kind in ("p3.2xlarge", "p3.16xlarge", "p2.xlarge", "p2.8xlarge"):
        prices = [
            {
                "AvailabilityZone": zone,
                "ProductDescription": "Linux/UNIX",
                "Timestamp": "2020-03-01T00:00:00.000Z",
                "SpotPrice": "0.918000",
            }
            for zone in ("us-east-1b", "us-east-1c")
        ]
        put(logs / "aws" / "cost" / "us-east-1" / f"2020-03-05.{kind}.json", [json.dumps({"SpotPriceHistory": prices})])
    put(
        logs / "gcp" / "availability" / "persistent_2020-03-01.out",
        [
            "[2020-03-01T10:00:00.000Z] Created instance instance0 with 1 GPU(s) of type nvidia-tesla-v100 in zone b",
            "[2020-03-01T10:00:01.000Z] Instance instance1 creation failed",
            "[2020-03-01T10:10:00.000Z] Instance instance0 not running in zone b",
        ],
    )
    found = dict(kept_running(tmp_path))
    zones = {name: {zone: one["nodes"] for zone, one in market["zones"].items()} for name, market in found.items()}
    assert zones["p3.2xlarge-2020-03"] == {"us-east-1b": "3x1 1x0 2x1", "us-east-1c": "6x1"}
    assert zones["p2.8xlarge-2020-03"] == {"us-east-1b": "6x1", "us-east-1c": "3x1 3x0"}
    assert zones["gcp-v100-2020-03"] == {"b": "3x1"}
    assert "gcp-k80-2020-03" not in found


def test_of_a_group_the_least_number_within_a_tick_counts(tmp_path):
    bamboo = tmp_path / "bamboo"
    for name in ("p3", "g4dn"):
        events = [
            "0,add,node1",
            "0,add,node2",
            "190000,remove,node1",
            "200000,add,node3",
            "400000,add,node4",
            "540000,add,n5",
        ]
        put(bamboo / f"{name}-trace.csv", events)
    put(
        bamboo / "2020" / "aws-spot-instances-p2-xlarge-2020-11-20-to-2020-11-23.csv", ["0.000,0", "0.030,9", "0.200,8"]
    )
    hour = "aws-spot-instances-g4dn-xlarge-us-east-1c-2020-11-20-1930-to-2020-11-21-2200.csv"
    put(bamboo / "2020" / hour, ["0,8", "180,7", "360,7"])
    for name in ("a100x1-east1b", "v100x1-east1c"):
        put(
            bamboo / f"{name}.txt", ["2021-12-11, 11:11:30, 55", "2021-12-11, 11:13:10, 54", "2021-12-11, 11:17:30, 54"]
        )
    found = {name: next(iter(market["zones"].values()))["nodes"] for name, market in counted(tmp_path)}
    assert found == {
        "p3.2xlarge-group": "1x2 1x1 1x2",
        "g4dn.xlarge-group": "1x2 1x1 1x2",
        "p2.xlarge-2020-11": "3x9",
        "g4dn.xlarge-2020-11": "1x8 1x7",
        "gcp-a100-2021-12": "2x54",
        "gcp-v100-2021-12": "2x54",
    }
