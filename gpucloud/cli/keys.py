"""`keys`: whose orders may start something here."""

from __future__ import annotations

from typing import Any

from gpucloud.cli.render import say, say_json, table, tell
from gpucloud.domain.authorization import OWN
from gpucloud.wiring import Gpucloud


def show(*, as_json: bool) -> int:
    """Write the own key, to be handed to others, and the trusted ones; return the exit code."""
    ring = Gpucloud().keys()
    own, others = ring.signer(), ring.listed()
    if as_json:
        say_json(
            {
                "own": {"key_id": own.key_id, "key": own.line},
                "trusted": [_json(key.name, key.key_id, key.line, key.place) for key in others],
            }
        )
        return 0
    say(own.line)
    if others:
        say(table([("trusted", "", "from"), *((key.name, key.key_id, key.place) for key in others)]))
    tell(f"yours is {own.key_id}; others trust it with: gpucloud keys add NAME '{own.line}'")
    return 0


def add(name: str, text: str, *, as_json: bool) -> int:
    """Trust somebody's key; return the exit code."""
    key = Gpucloud().keys().add(name, text)
    if as_json:
        say_json({"added": _json(key.name, key.key_id, key.line, key.place)})
    else:
        say(f"{key.name} is trusted: {key.key_id}")
    return 0


def revoke(which: str, *, as_json: bool) -> int:
    """Trust a key no longer; return the exit code."""
    key = Gpucloud().keys().revoke(which)
    if as_json:
        say_json({"revoked": _json(key.name, key.key_id, key.line, key.place)})
        return 0
    say(f"{key.name} is no longer trusted: {key.key_id}")
    tell("what it signed starts nothing here now; machines that run go on, for as long as they are paid")
    if key.name == OWN:
        tell(
            "a job that you started goes on after `gpucloud train JOB` alone, which signs it anew, or ends with `down`"
        )
        tell(
            "others trust your next key when they add what `gpucloud keys` shows now, and this one until they revoke it"
        )
    else:
        tell("`gpucloud train JOB` gives an order of your own for a job that it signed, `gpucloud down JOB` ends it")
    return 0


def _json(name: str, key_id: str, line: str, place: str) -> dict[str, Any]:
    return {"name": name, "key_id": key_id, "key": line, "from": place}
