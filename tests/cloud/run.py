"""Proves on a real AWS account what the tests show on an emulated one: `python -m tests.cloud.run --yes-spend-5-usd`.

It costs less than 5 USD and takes about an hour. See README.md beside it. Each conclusion is one line
`FIGURE name value limit pass|fail`; the exit code is 0 when all pass. However it ends, it runs `gpucloud down` for
every job that it started, and prints what lives.
"""

from __future__ import annotations

import argparse
import atexit
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from types import FrameType

from tests.cloud.account import Account, ended_at
from tests.cloud.figures import (
    MOST_USD,
    Figures,
    Resource,
    TooDear,
    appeared,
    left_over,
    median,
    refund_command,
    vanished,
)
from tests.cloud.jobs import LOOK_S, Jobs

WARM_STARTS = 3
# Hard limits of the jobs themselves; 4 USD in all. What they really cost is a tenth of it.
BUDGETS = {
    "proof": "1 USD",
    **{f"warm-{number}": "0.75 USD" for number in range(1, WARM_STARTS + 1)},
    "lag": "0.75 USD",
}
NODES = {"lag": 1}
AHEAD = timedelta(minutes=3)
RESERVE_S = 300.0
_NEVER_S = 900.0


def main(arguments: list[str]) -> int:
    """Return 0 when every figure keeps its limit."""
    parser = argparse.ArgumentParser(prog="python -m tests.cloud.run", description=__doc__)
    parser.add_argument("--yes-spend-5-usd", action="store_true", help="without it, nothing is done")
    parser.add_argument("--region", help="the region; that of your AWS configuration if left out")
    chosen = parser.parse_args(arguments)
    if not chosen.yes_spend_5_usd:
        parser.error("this rents machines for up to 5 USD: say --yes-spend-5-usd")
    run = Run(Account(chosen.region), Path(tempfile.mkdtemp(prefix="gpucloud-cloud-")))
    print(f"jobs, keys and answers of this run are kept in {run.jobs.folder}", flush=True)
    signal.signal(signal.SIGTERM, _leave)
    atexit.register(run.jobs.end_everything)
    try:
        run.whole()
    except TooDear as error:
        print(error, file=sys.stderr)
        return 1
    print(f"missed: {', '.join(run.figures.missed) or 'nothing'}")
    return 1 if run.figures.missed else 0


class Run:
    """One run: its folder, its jobs, and what it has found."""

    def __init__(self, account: Account, folder: Path) -> None:
        self.account = account
        self.figures = Figures()
        self.jobs = Jobs(account, folder, BUDGETS, NODES)

    def whole(self) -> None:
        """Take every step, in the order in which it costs."""
        self.account_is_ready()
        before = self.account.inventory()
        self.figures.told("inventory_before", len(before))
        self.plan_is_below_the_limit()
        self.drilled_run()
        self.starts_are_quick()
        self.one_machine()
        self.nothing_is_left(before)
        self.spent()

    def account_is_ready(self) -> None:
        """Who pays, and whether the quota holds two machines."""
        self.figures.told("caller", self.account.caller()["Arn"])
        self.figures.told("region", self.account.region)
        quota = self.account.spot_quota()
        self.figures.at_least("quota_spot_g_vcpus", quota, 8)
        if quota < 8:
            raise SystemExit(f"gpucloud quota request {self.jobs.file('proof')} asks AWS for more; then run this again")
        if self.account.alive():
            raise SystemExit(f"machines of gpucloud run in {self.account.region}: choose another region")

    def plan_is_below_the_limit(self) -> None:
        """Price and worst cost, before anything is made."""
        plan = self.jobs.answer("plan", "proof")["plan"]
        self.jobs.usd_per_hour = Decimal(plan["cap_usd_per_hour"]) / plan["nodes"]
        self.figures.told("cap_usd_per_hour_of_a_machine", self.jobs.usd_per_hour)
        self.figures.at_most("worst_usd", float(plan["worst_usd"]), 1)

    def drilled_run(self) -> None:
        """A cold start, a real interruption with notice, and the end of the same job on another machine."""
        answer, first_step_s = self.jobs.train("proof", "--drill")
        self.figures.told("cold_train_to_first_step_s", round(first_step_s))
        self.figures.equal("drill_status", answer["status"], "succeeded")
        self.figures.at_least("drill_attempts", len(answer["attempts"]), 2)
        notices = [i for i in answer["interruptions"] if i["kind"] == "notice" and i["attempt"]]
        self.figures.at_least("drill_notices_seen", len(notices), 1)
        for one in notices:
            waited = _time(one["resumed_at"]) - _time(one["noticed_at"])
            self.figures.told("notice_to_first_step_s", round(waited.total_seconds()))
            self._refund(one["node"])
        self.jobs.down("proof")

    def starts_are_quick(self) -> None:
        """From the command to the first step, with the region's base there already."""
        times = []
        for number in range(1, WARM_STARTS + 1):
            _, seconds = self.jobs.train(f"warm-{number}")
            self.figures.told(f"warm_{number}_train_to_first_step_s", round(seconds))
            self.jobs.down(f"warm-{number}")
            times.append(seconds)
        self.figures.at_most("warm_train_to_first_step_s_p50", median(times), 150)

    def one_machine(self) -> None:
        """What only a machine can tell: the host key's path, and how late the shut-off comes when nobody is awake."""
        self.jobs.started.append("lag")
        answer = self.jobs.answer("up", "lag")
        (node,) = [one["id"] for one in answer["nodes"]]
        self._host_key_path(node)
        group = f"gpucloud-{self.jobs.name('lag')}"
        until = (datetime.now(timezone.utc) + AHEAD).replace(microsecond=0)
        self.account.bring_forward(group, until)  # `up` has left: no supervisor is there to move it on
        lag_s = self._lag(node, until)
        self.figures.at_most("shut_off_lag_s", lag_s, RESERVE_S)
        if lag_s < _NEVER_S:
            self.figures.told("launch_instances", self.account.launch_instances_answers(group))
        self.jobs.down("lag")

    def nothing_is_left(self, before: frozenset[Resource]) -> None:
        """After `down` the base alone stands; after `down --base --with-data` what stood before."""
        self._compare("left_after_down", lambda: left_over(before, self.account.inventory()))
        if any(one.base for one in before):
            self.figures.told("down_base", "not tried: the base stood before this run")
        else:
            self.jobs.gpucloud("down", "--base", "--region", self.account.region, "--with-data", "--yes")
            self._compare("left_after_down_base", lambda: appeared(before, self.account.inventory()))
        gone = [one for one in vanished(before, self.account.inventory()) if not one.base]
        self.figures.equal("others_things_gone", ",".join(map(str, gone)), "")

    def spent(self) -> None:
        """What it cost at the highest price, refunds not counted."""
        self.figures.at_most("spent_usd", float(self.jobs.spent_usd()), float(MOST_USD))

    def _host_key_path(self, node: str) -> None:
        """A machine may publish its own host key and no other machine's."""
        bucket = f"gpucloud-{self.account.caller()['Account']}-{self.account.region}"
        user = self.jobs.gpucloud("ssh", str(self.jobs.file("lag")), "--", *_WHO_AM_I).strip().splitlines()[-1]
        role = user.partition(":")[0]
        for name, whose, wanted in (("own", user, "allowed"), ("foreign", f"{role}:i-0{'a' * 16}", "AccessDenied")):
            key = f"clusters/gpucloud-{self.jobs.name('lag')}/hosts/{whose}"
            put = f"aws s3api put-object --bucket {bucket} --key {key} --body /etc/ssh/ssh_host_ed25519_key.pub"
            said = self.jobs.gpucloud("ssh", str(self.jobs.file("lag")), "--", "bash", "-c", f"{put} 2>&1 || true")
            got = "AccessDenied" if "AccessDenied" in said else "allowed" if "ETag" in said else "unclear"
            self.figures.equal(f"host_key_path_{name}", got, wanted)
        self.figures.equal("host_key_user_is_this_machine", user.partition(":")[2], node)

    def _lag(self, node: str, until: datetime) -> float:
        """Return how many seconds after `until` the machine began to end."""
        while (reason := self.account.ending(node)) is None:
            if datetime.now(timezone.utc) > until + timedelta(seconds=_NEVER_S):
                return _NEVER_S
            time.sleep(LOOK_S)
        return ((ended_at(reason) or datetime.now(timezone.utc)) - until).total_seconds()

    def _refund(self, node: str) -> None:
        """AWS charges nothing for what it takes in the first hour; the bill says so the next day."""
        words = refund_command(node, self.jobs.began.date())
        with (self.jobs.folder / "refund.txt").open("a") as kept:
            kept.write(words + "\n")
        print(
            f"tomorrow, the bill of the machine that was taken (0 USD is what must stand there):\n  {words}", flush=True
        )

    def _compare(self, name: str, found: Callable[[], tuple[Resource, ...]]) -> None:
        """Tell what is too much; EC2 tells the tags of what is gone for some minutes."""
        limit = time.monotonic() + 300
        while (left := found()) and time.monotonic() < limit:
            time.sleep(LOOK_S)
        self.figures.equal(name, ",".join(map(str, left)), "")


_WHO_AM_I = ("aws", "sts", "get-caller-identity", "--query", "UserId", "--output", "text")


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
