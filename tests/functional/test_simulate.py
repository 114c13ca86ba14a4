"""`gpucloud simulate` on the package's own markets: what it says, draws and refuses."""

import json
import re
import sys

import pytest

from gpucloud.__main__ import main

JOB = """\
name: vision
code: code
run: train.py
resources: {nodes: 1, market: auto, regions: [us-west-2]}
budget: 160 USD
work: 48h
deadline: 60h
"""
AWS_JOB = JOB.replace("budget: 160", "cloud: aws\nbudget: 4000").replace(
    "nodes: 1", "nodes: 1, gpus: 8, types: [p5.48xlarge]"
)
QUICK = ("--windows", "3")
NEVER_AGAIN = "finished within its deadline and budget, in every window"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("from gpucloud import resume\n")
    (tmp_path / "train.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def answers(monkeypatch, capsys):
    def said(*words):
        """Return the exit code, the answer and the story."""
        monkeypatch.setattr("sys.argv", ["gpucloud", *words])
        with pytest.raises(SystemExit) as left:
            main()
        told = capsys.readouterr()
        return left.value.code or 0, told.out, told.err

    return said


@pytest.fixture
def simulate(answers):
    """Rehearse with starts of a cloud, where no others are named."""
    return lambda *words: answers("simulate", *words, *([] if "--restart" in words else ["--restart", "10min"]))


def test_a_job_is_rehearsed_in_its_own_regions(simulate):
    code, answer, story = simulate("train.yaml", "--policy", "uniform", "--policy", "on_demand", *QUICK)
    assert (code, story) == (0, "")
    lines = answer.splitlines()
    assert lines[0] == "vision: 48 h of work within 60 h, for 160.00 USD at the most on 1 × p3.2xlarge (1 × V100)"
    assert lines[1] == "a restart takes 10 min (--restart changes it); an interruption undoes the 2 min of its notice"
    assert lines[2].startswith("market p3.2xlarge-2023-02: launches tried every 195 s on AWS, 2023-02-16, 44 d 20 h;")
    assert " 3.06 USD an hour on demand (of p3.2xlarge, not of yours: --price), spot prices recorded" in lines[2]
    uniform, on_demand = (line.split() for line in lines[6:8])
    assert (uniform[:3], float(uniform[3]) < 100) == (["us-west-2", "(3)", "uniform"], True)
    # 48 h and 10 min for 3.06 USD, whatever the window
    assert on_demand[2:] == ["on_demand", "147.39", "147.39", "147.39", "100.3%", "48.2", "h", "0.0", "1.0"]
    assert NEVER_AGAIN in lines
    assert lines[-1].startswith("these were V100 machines of 2023: others, H100-class ones above all, may")


def test_the_same_seed_gives_the_same_answer_and_another_another(simulate):
    words = ("train.yaml", "--policy", "uniform", "--json", *QUICK)
    first, again, other = (json.loads(simulate(*words, "--seed", seed)[1]) for seed in ("1", "1", "2"))
    assert first == again
    assert first["markets"][0]["results"] != other["markets"][0]["results"]


def test_json_has_every_figure(simulate):
    _, answer, _ = simulate("train.yaml", "--zones", "us-west-2a", "--policy", "on_demand", "--json", *QUICK)
    found = json.loads(answer)
    assert {key: found[key] for key in ("version", "job", "work_s", "deadline_s", "budget_usd", "nodes")} == {
        "version": 1,
        "job": "vision",
        "work_s": 172800.0,
        "deadline_s": 216000.0,
        "budget_usd": "160",
        "nodes": 1,
    }
    (market,) = found["markets"]
    assert (market["market"], market["windows"], market["seed"]) == ("p3.2xlarge-2023-02", 3, 0)
    assert market["results"] == [
        {
            "zones": ["us-west-2a"],
            "deadline_s": 216000.0,
            "policy": "on_demand",
            "runs_on": "on_demand",
            "mean_usd": "147.39",
            "p90_usd": "147.39",
            "worst_usd": "147.39",
            "of_on_demand": 1.0035,
            "missed": 0,
            "over_budget": 0,
            "late": 0,
            "unended": 0,
            "interruptions": 0.0,
            "launches": 1.0,
            "took_s": 173400.0,
        }
    ]


def test_options_stand_for_what_the_file_says_and_for_another_machine(simulate):
    words = ("--work", "4h", "--deadline", "6h", "--budget", "250USD", "--price", "$55.04", "--policy", "on_demand")
    _, answer, _ = simulate("train.yaml", *words, "--restart", "6min", "--json", *QUICK)
    (market,) = json.loads(answer)["markets"]
    assert market["on_demand_usd_per_hour"] == "55.04"
    assert market["results"][0]["mean_usd"] == "225.66"  # 4.1 h


LOCAL = (
    "48 h of work and two changeovers (30 s each: a restart of 15 s, and 15 s of work done again) take 48 h 1 min;"
    " the deadline is after 48 h"
)
AWS = (
    "48 h of work and two changeovers (12 min each: a restart of 10 min, and 2 min of work done again) take"
    " 48 h 24 min; the deadline is after 48 h"
)
OTHERS = ", or --restart with how long yours take from a launch to the first step, "


@pytest.mark.parametrize(
    ("job", "refused", "taken"),
    [(JOB.replace(", market: auto, regions: [us-west-2]", ""), LOCAL, "15 s"), (AWS_JOB, AWS, "10 min")],
)
def test_a_rehearsal_takes_starts_to_be_as_long_as_a_plan_does(answers, folder, monkeypatch, job, refused, taken):
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    (folder / "train.yaml").write_text(job.replace("deadline: 60h", "deadline: 48h"))
    rehearsed = answers("simulate", "train.yaml")
    assert rehearsed[0] == 2
    if job is not AWS_JOB:  # whose plan asks AWS first
        assert f"error: {refused.split(';')[0]}, and the deadline" in answers("plan", "train.yaml")[2]
    assert rehearsed[2].splitlines()[-2] == f"error: {refused}"
    assert rehearsed[2].endswith(f"{OTHERS}{taken} here\n")


def test_a_job_on_the_embedded_fleet_is_rehearsed_with_the_starts_of_its_plan(answers):
    words = ("train.yaml", "--policy", "on_demand", "--json", *QUICK)
    own = json.loads(answers("simulate", *words)[1])
    assert (own["restart_s"], own["notice_s"]) == (15.0, 15.0)
    others = json.loads(answers("simulate", *words, "--restart", "10min")[1])
    assert (others["restart_s"], others["notice_s"]) == (600.0, 120.0)


def test_a_job_on_aws_is_priced_by_the_catalog(simulate, folder, monkeypatch):
    monkeypatch.delenv("AWS_REGION", raising=False)
    (folder / "train.yaml").write_text(AWS_JOB)
    _, answer, story = simulate("train.yaml", "--policy", "on_demand", "--json", *QUICK)
    market = json.loads(answer)["markets"][0]
    assert market["on_demand_usd_per_hour"] == "55.04"
    assert "priced as p5.48xlarge in us-west-2: 55.04 USD an hour, list price of 2026-07-20 (" in story
    assert "us-west-2 taken to be priced as us-east-1" in story
    # eight GPUs: on recordings of eight, at the price that `plan` reckons with
    names = [one["market"] for one in json.loads(answer)["markets"]]
    assert names == ["p3.16xlarge-2022-10", "p3.16xlarge-2022-11", "p3.16xlarge-2022-12"]
    assert "spot at 29.72 USD an hour, the price of 2025-06-28 (" in story
    assert "days old), throughout, as `plan` has it\ndisk and address 0.0169 USD an hour\n" in story
    _, answer, story = simulate("train.yaml", "--policy", "on_demand", "--price", "3 USD", "--json", *QUICK)
    assert (json.loads(answer)["markets"][0]["on_demand_usd_per_hour"], story) == ("3", "")


def test_deadlines_are_swept_from_the_tightest_to_twice_the_work(simulate):
    _, answer, _ = simulate("train.yaml", "--sweep", "--policy", "greedy", "--json", *QUICK)
    results = json.loads(answer)["markets"][0]["results"]
    assert [one["deadline_s"] / 3600 for one in results] == [48.4, 52.8, 60, 72, 84, 96]
    assert sum(one["missed"] + one["over_budget"] for one in results) == 0
    costs = [float(one["mean_usd"]) for one in results]
    assert costs[0] > costs[-1]
    _, answer, _ = simulate("train.yaml", "--sweep", "--policy", "greedy", "--policy", "on_demand", *QUICK)
    assert [line.split() for line in answer.splitlines()[5:7]] == [
        ["zones", "deadline", "greedy", "USD", "on_demand", "USD"],
        ["us-west-2", "(3)", "48.4", "h", results[0]["mean_usd"], "147.39"],
    ]


def test_without_notice_work_since_the_last_checkpoint_is_lost(simulate):
    _, answer, _ = simulate("train.yaml", "--no-notice", "--policy", "uniform", *QUICK)
    assert "an interruption undoes up to 10 min of work" in answer
    assert NEVER_AGAIN in answer


def test_the_learned_policy_is_tried_on_weeks_that_it_has_not_seen(simulate):
    words = ("--zones", "us-east-1f", "--policy", "learned", "--policy", "uniform")
    _, answer, _ = simulate("train.yaml", *words, "--windows", "8")
    learned, uniform = (line.split() for line in answer.splitlines()[6:8])
    assert (learned[1], uniform[1]) == ("learned", "uniform")
    assert float(learned[2]) < float(uniform[2])
    assert NEVER_AGAIN in answer
    assert "learned knows nothing of these weeks, only of the other recordings" in answer


def test_several_markets_are_answered_one_after_the_other(simulate):
    words = ("--recording", "p3.16xlarge-2022-10", "--recording", "p3.16xlarge-2022-12", "--price", "3USD")
    _, answer, _ = simulate("train.yaml", *words, "--policy", "greedy", *QUICK)
    assert answer.count("vision: 48 h of work within 60 h") == 2


@pytest.mark.parametrize("name", ["costs.png", "costs.svg", "sweep.svg"])
def test_costs_are_drawn(simulate, folder, name):
    pytest.importorskip("matplotlib")
    words = ["--sweep"] if name.startswith("sweep") else []
    code, _, story = simulate("train.yaml", "--policy", "uniform", "--plot", name, *words, *QUICK)
    assert (code, story) == (0, f"drawn: {name}\n")
    drawn = (folder / name).read_bytes()
    assert drawn.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")


def test_the_same_charts_are_the_same_file(simulate, folder):
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        simulate("train.yaml", "--policy", "greedy", "--plot", name, *QUICK)
    assert (folder / "a.svg").read_bytes() == (folder / "b.svg").read_bytes()


def test_without_matplotlib_there_is_one_clear_error(simulate, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "gpucloud.adapters.plots", raising=False)
    code, answer, story = simulate("train.yaml", "--plot", "a.png")
    assert (code, answer) == (5, "")
    assert story == "error: plots need matplotlib\nhint: pip install 'gpucloud[plots]'\n"


def test_the_markets_are_listed_with_their_figures_and_licences(simulate):
    code, answer, _ = simulate("--list")
    assert code == 0
    row = next(line for line in answer.splitlines() if line.startswith("p3.2xlarge-2023-02"))
    assert row.split()[1:] == [
        *("p3.2xlarge", "(1", "×", "V100)", "1", "9", "2023-02-16", "44", "d", "20", "h"),
        *("99%", "(17%–90%)", "0.3", "30%–54%"),
    ]
    assert "(Apache-2.0)" in answer
    assert "(MIT)" in answer
    markets = json.loads(simulate("--list", "--json")[1])["markets"]
    assert len(markets) == 28
    zones = next(one for one in markets if one["market"] == "p3.2xlarge-2023-02")["zones"]
    assert zones[0] == {
        "zone": "us-east-1a",
        "available": 0.1664,
        "interruptions_per_day": 5.64,
        "spot_usd_per_hour": "1.6554",
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--deadline", "48h"),
            "error: 48 h of work and two changeovers (12 min each: a restart of 10 min, and 2 min of work done again)"
            " take 48 h 24 min; the deadline is after 48 h\n"
            "hint: --deadline '48h 24min', or --restart with how long yours take from a launch to the first step,"
            " 10 min here\n",
        ),
        (
            ("--budget", "100USD"),
            "error: 48 h of work on 1 × p3.2xlarge (1 × V100) need 147.68 USD to be finished on demand whatever"
            " happens; the budget is 100.00 USD\nhint: --budget '147.68 USD', --price with"
            " what your machine costs an hour on demand, or --restart with how long yours take from a launch to the"
            " first step, 10 min here\n",
        ),
        (
            ("--recording", "p3-2xlarge-2023"),
            "error: no recorded market is called 'p3-2xlarge-2023'\nhint: did you mean p3.",
        ),
        (("--zones", "us-west-9"), "error: p3.2xlarge-2023-02 has no zone or region 'us-west-9'\nhint: there are us-"),
        (("--recording", "gcp-a100-2021-12"), "error: gcp-a100-2021-12 is 27 h long, and the job may take 60 h"),
        (("--restart", "0s"), "error: --restart: 0s is too little to be rehearsed\nhint: leave it out, or name more\n"),
        (("--price", "0USD"), "error: --price: 0USD is too little to be rehearsed\nhint: leave it out, or name more\n"),
        (("--work", "many"), 'error: --work: "many" is not a span of time'),
        (
            ("--plot", "costs.pdf"),
            "error: costs.pdf names no format that is drawn here\nhint: a name that ends in .png",
        ),
        (("--plot", "no/costs.png"), "error: there is no folder no\nhint: mkdir -p no"),
    ],
)
def test_what_cannot_be_is_said_with_what_must_move(simulate, words, said):
    code, answer, story = simulate("train.yaml", *words, *QUICK)
    assert (code, answer) == (2, "")
    assert story.startswith(said)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (
            "work: 48h\n",
            "error: train.yaml does not say how much work the job is\nhint: `work: 48h` there, or --work 48h",
        ),
    ],
)
def test_what_the_job_file_does_not_say_is_asked_for(simulate, folder, key, said):
    (folder / "train.yaml").write_text(JOB.replace(key, ""))
    code, answer, story = simulate("train.yaml")
    assert (code, answer, story) == (2, "", said + "\n")


def test_a_job_without_a_deadline_asks_no_policy(simulate, folder):
    (folder / "train.yaml").write_text(JOB.replace("deadline: 60h\n", ""))
    code, answer, _ = simulate("train.yaml", *QUICK)
    assert code == 0
    lines = answer.splitlines()
    assert lines[0].startswith("vision: 48 h of work without a deadline, for 160.00 USD at the most")
    assert [line.split("  ")[1].strip() for line in lines[6:8]] == ["spot, else on demand", "on_demand"]
    assert "finished within its budget, in every window" in lines
    found = json.loads(simulate("train.yaml", "--json", *QUICK)[1])
    assert found["deadline_s"] is None
    results = found["markets"][0]["results"]
    assert [(one["policy"], one["deadline_s"], one["missed"]) for one in results] == [
        (None, None, 0),
        ("on_demand", None, 0),
    ]
    assert float(results[0]["mean_usd"]) < 100
    code, _, story = simulate("train.yaml", "--policy", "greedy", *QUICK)
    assert (code, story) == (
        2,
        "error: without a deadline no policy is asked\nhint: --deadline 60h, or --sweep, for --policy\n",
    )
    assert "48.4 h" in simulate("train.yaml", "--sweep", "--policy", "greedy", *QUICK)[1]


def test_a_deadline_on_one_market_alone_is_rehearsed_on_that_market(simulate, folder):
    (folder / "train.yaml").write_text(JOB.replace("market: auto", "market: spot").replace("60h", "50h"))
    words = ("train.yaml", "--zones", "us-west-2a", "--windows", "12")
    code, answer, story = simulate(*words)
    assert (code, story) == (0, "")
    lines = answer.splitlines()
    assert [line.split("  ")[1].strip() for line in lines[6:8]] == ["spot alone", "on_demand"]
    late = re.fullmatch(r"spot alone in us-west-2a: (\d+) of 12 ended unfinished at the deadline", lines[9])
    assert late is not None, lines
    spot, _ = json.loads(simulate(*words, "--json")[1])["markets"][0]["results"]
    assert (spot["policy"], spot["runs_on"]) == (None, "spot alone")
    assert (spot["late"], spot["missed"]) == (int(late[1]), int(late[1]))
    assert spot["took_s"] is None or spot["took_s"] <= 50 * 3600
    _, answer, story = simulate("train.yaml", "--policy", "uniform", *QUICK)
    assert "replayed as with `market: auto`, which alone asks a policy" in story
    assert NEVER_AGAIN in answer.splitlines()
    (folder / "train.yaml").write_text(JOB.replace("market: auto", "market: on_demand").replace("60h", "48h 12min"))
    code, answer, story = simulate("train.yaml", *QUICK)  # one changeover of 12 min is enough
    assert (code, story) == (0, "")
    lines = answer.splitlines()
    assert (lines[6].split("  ")[1].strip(), lines[7]) == ("on_demand", "")
    assert NEVER_AGAIN in lines


def test_a_script_that_saves_nothing_is_rehearsed_from_its_beginning(simulate, folder):
    words = ("train.yaml", "--budget", "600USD")
    (folder / "train.yaml").write_text(JOB.replace("market: auto", "market: spot"))
    kept = json.loads(simulate(*words, "--json", *QUICK)[1])
    (folder / "code" / "train.py").write_text("import torch\n")
    anew = json.loads(simulate(*words, "--json", *QUICK)[1])
    of_each = [one["markets"][0]["results"][0] for one in (kept, anew)]
    assert [(one["late"], one["mean_usd"] is None) for one in of_each] == [(1, False), (3, True)]  # 48 h without a loss
    assert (kept["save_s"], anew["save_s"], anew["notice_s"]) == (600.0, None, None)
    _, answer, _ = simulate(*words, *QUICK)
    assert (
        "a restart takes 10 min (--restart changes it); it saves nothing: whenever its machines go, it begins anew"
        in answer
    )


def test_a_script_that_saves_nothing_is_rehearsed_as_its_supervisor_keeps_its_deadline(simulate, folder):
    (folder / "code" / "train.py").write_text("import torch\n")
    words = ("train.yaml", "--policy", "greedy", "--budget", "600USD", "--json")
    anew = json.loads(simulate(*words, *QUICK)[1])
    (folder / "train.yaml").write_text(f"{JOB}checkpoint: none\n")
    meant = json.loads(simulate(*words, *QUICK)[1])
    found, said = (one["markets"][0]["results"][0] for one in (anew, meant))
    assert found == said
    assert (found["missed"], found["interruptions"], found["launches"]) == (0, 0, 1)  # on demand: no two runs fit


def test_what_checkpoints_cost_in_s3_is_said_as_in_a_plan(simulate, folder, monkeypatch):
    monkeypatch.delenv("AWS_REGION", raising=False)
    (folder / "train.yaml").write_text(AWS_JOB + "model: {params: 7B, strategy: fsdp}\n")
    words = ("train.yaml", "--recording", "p3.16xlarge-2022-12", "--policy", "uniform", *QUICK)
    _, answer, _ = simulate(*words)
    assert "outside the budget: about " in answer
    assert " saves of 78.2 GiB, in no budget" in answer
    stored = json.loads(simulate(*words, "--json")[1])["markets"][0]["stored"]
    assert stored["save_bytes"] == 84 * 10**9
    (folder / "code" / "train.py").write_text("import torch\n")
    assert json.loads(simulate(*words, "--json")[1])["markets"][0]["stored"] is None


def test_a_job_on_aws_is_rehearsed_in_every_recorded_region_and_another_in_its_own(simulate, folder, monkeypatch):
    monkeypatch.delenv("AWS_REGION", raising=False)
    words = ("train.yaml", "--policy", "on_demand", "--json", *QUICK)

    def zones():
        return [len(one["zones"]) for one in json.loads(simulate(*words)[1])["markets"][0]["results"]]

    assert zones() == [3]
    (folder / "train.yaml").write_text(JOB.replace("budget", "cloud: aws\nbudget").replace("160", "600"))
    assert zones() == [4, 2, 3, 9]


def test_tokens_say_how_much_work_the_job_is_on_the_machine_that_it_gets(simulate, folder, monkeypatch):
    monkeypatch.delenv("AWS_REGION", raising=False)
    model = "model: {params: 7B, strategy: fsdp, tokens: 10B}"
    (folder / "train.yaml").write_text(AWS_JOB.replace("work: 48h", model))
    _, answer, _ = simulate("train.yaml", "--policy", "on_demand", "--json", *QUICK)
    # 6 · 7e9 · 10e9 / (8 · 989.5e12 · 35 %)
    assert json.loads(answer)["work_s"] == pytest.approx(151_592, abs=1)


def test_a_job_on_aws_that_names_no_region_is_rehearsed_as_it_is_planned_without_an_account(
    answers, folder, monkeypatch
):
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "none"))
    (folder / "train.yaml").write_text(AWS_JOB.replace(", regions: [us-west-2]", ""))
    for more in ((), ("--price", "3 USD")):
        code, answer, story = answers("simulate", "train.yaml", "--policy", "on_demand", *QUICK, *more)
        assert (code, "error" in story) == (0, False)
        assert "a restart takes 10 min (" in answer


def test_a_small_job_in_a_large_group_is_said_to_lose_its_nodes_last(simulate):
    words = ("--recording", "gcp-a100-2021-12", "--work", "8h", "--deadline", "10h", "--policy", "greedy")
    _, answer, _ = simulate("train.yaml", *words, *QUICK)
    assert "recorded with 64 machines: the job's are taken to be the last that go" in answer


def test_a_gang_on_a_market_of_single_machines_is_said_to_be_taken_as_one(simulate, folder):
    (folder / "train.yaml").write_text(JOB.replace("nodes: 1", "nodes: 4"))
    _, answer, _ = simulate("train.yaml", "--budget", "600USD", "--policy", "on_demand", *QUICK)
    assert "recorded with one machine: all 4 are taken to come and go together" in answer


def test_what_the_budget_ended_is_unfinished_and_never_dearer(simulate, folder):
    (folder / "train.yaml").write_text(JOB.replace("deadline: 60h\n", "").replace("160 USD", "60 USD"))
    code, answer, _ = simulate("train.yaml", *QUICK)
    assert code == 0
    lines = answer.splitlines()
    assert re.fullmatch(r"on_demand in .*: (\d+) of \1 ended unfinished at the budget", lines[10]), lines
    cells = ["on_demand", "over budget", "over budget", "60.00", "-", "unfinished", "-", "-"]
    assert re.split(r" {2,}", lines[7])[1:] == cells


def test_a_job_without_a_deadline_is_said_to_run_on_spot_machines_in_json_too(simulate, folder):
    text = JOB.replace("deadline: 60h\n", "").replace("market: auto", "market: spot")
    (folder / "train.yaml").write_text(text)
    _, answer, _ = simulate("train.yaml", "--json", *QUICK)
    results = json.loads(answer)["markets"][0]["results"]
    assert [(one["policy"], one["runs_on"]) for one in results[:1]] == [(None, "spot alone")]
    assert "greedy" not in answer
