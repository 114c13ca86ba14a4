"""What is made of a failed script's output."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest

from gpucloud.cli.render.reports import report_text
from gpucloud.domain.money.budget import Spend
from gpucloud.domain.node.node import NO_GROUP
from gpucloud.domain.node.output import advice_for, failure_of, first_to_fail, unsaved_of, without_code_folder
from gpucloud.domain.state.state import ExitReason, JobStatus
from gpucloud.usecases.jobstore.report import JobReport, report
from gpucloud.usecases.supervise.story import cause
from tests.unit.worlds import opened, state

CODE = "/home/ubuntu/.gpucloud/code/" + "72ef9c8d" * 8

PLAIN = f"""hello
Traceback (most recent call last):
  File "{CODE}/boom.py", line 3, in <module>
    raise ValueError("my bad learning rate")
ValueError: my bad learning rate
"""
DEEP = f"""[rank1]: Traceback (most recent call last):
[rank1]:   File "{CODE}/src/train.py", line 12, in <module>
[rank1]:     main()
[rank1]:   File "{CODE}/src/model/net.py", line 40, in main
[rank1]:     loss.backward()
[rank1]:   File "/venv/lib/python3.11/site-packages/torch/_tensor.py", line 521, in backward
[rank1]:     torch.autograd.backward(
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB
[rank1]:W1124 destroy_process_group() was not called
"""
CHAINED = f"""Traceback (most recent call last):
  File "{CODE}/a.py", line 1, in <module>
    {{}}["x"]
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "{CODE}/a.py", line 3, in <module>
    raise AssertionError
AssertionError
Exception ignored in: <function f at 0x7f>
Traceback (most recent call last):
  File "{CODE}/b.py", line 9, in f
ZeroDivisionError: division by zero
"""
SYNTAX = f"""  File "{CODE}/boom.py", line 3
    def (
        ^
SyntaxError: invalid syntax
"""
IMPORTED_SYNTAX = f"""Traceback (most recent call last):
  File "{CODE}/train.py", line 1, in <module>
    import boom
  File "{CODE}/boom.py", line 3
    def (
        ^
SyntaxError: invalid syntax
"""
ELSEWHERE = """Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/opt/tool/run.py", line 7, in <module>
RuntimeError: stuck
"""


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (PLAIN, "ValueError: my bad learning rate (boom.py:3, rank 1)"),
        (
            DEEP,
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB (src/model/net.py:40, rank 1)",
        ),
        (CHAINED, "AssertionError (a.py:3, rank 1)"),
        (SYNTAX, "SyntaxError: invalid syntax (boom.py:3, rank 1)"),
        (IMPORTED_SYNTAX, "SyntaxError: invalid syntax (boom.py:3, rank 1)"),
        (ELSEWHERE, "RuntimeError: stuck (run.py:7, rank 1)"),
        ("no traceback at all\n", None),
        ("Traceback (most recent call last):\n", None),
        ('Traceback (most recent call last):\n  File "x.py", line 1\n== not an exception ==\n', None),
        ("", None),
    ],
)
def test_the_last_exception_is_named_with_its_place_in_the_jobs_code(output: str, expected: str | None) -> None:
    assert failure_of(output, 1) == expected


def test_hostile_words_are_one_short_line_that_no_terminal_obeys() -> None:
    said = failure_of(PLAIN.replace("ValueError: my", "ValueError: \x1b]52;c;AAAA\x07" + "a" * 5000), 0)
    assert said == "ValueError: " + "a" * 187 + "… (boom.py:3, rank 0)"


def test_a_hostile_path_is_cut() -> None:
    assert failure_of(PLAIN.replace("/boom.py", f"/\x1b[31m{'b' * 500}.py"), 0) == (
        f"ValueError: my bad learning rate ({'b' * 79}…:3, rank 0)"
    )


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (
            "ModuleNotFoundError: No module named 'apex_of_nothing' (a.py:1, rank 0)",
            "setup: uv pip install apex_of_nothing",
        ),
        ("ModuleNotFoundError: No module named 'yaml.cyaml' (a.py:1, rank 0)", "setup: uv pip install pyyaml"),
        ("ModuleNotFoundError: No module named 'x; rm -r ~' (a.py:1, rank 0)", None),
        ("ValueError: my bad learning rate (a.py:1, rank 0)", None),
    ],
)
def test_a_missing_module_is_to_be_set_up(failure: str, expected: str | None) -> None:
    assert advice_for(failure) == advice_for(failure, resumed=True) == expected


@pytest.mark.parametrize(
    "failure",
    [
        "NameError: name 'loss' is not defined (train.py:28, rank 0)",
        "UnboundLocalError: cannot access local variable 'loss' where it is not associated with a value",
        "UnboundLocalError: local variable 'loss' referenced before assignment (a.py:1, rank 0)",
    ],
)
def test_what_an_epochs_loop_sets_is_not_set_in_a_run_that_resumes_behind_it(failure: str) -> None:
    said = "saved at an epoch's last step, it goes on behind the loop: set loss ahead of it"
    assert (advice_for(failure), advice_for(failure, resumed=True)) == (None, said)


def test_files_of_the_code_are_shown_by_their_paths_in_it() -> None:
    shown = without_code_folder(f'  File "{CODE}/src/boom.py", line 3, in <module>')
    assert shown == '  File "src/boom.py", line 3, in <module>'
    assert without_code_folder("see https://x.org/code/main/a.py") == "see https://x.org/code/main/a.py"


UNSAVED = "gpucloud: rank 0 could not save step 15: No space left on device\n"
WHY = "cannot write /s/checkpoints/x: No space left on device (free some space there, or name another store)"
FULL = f"gpucloud: rank 0 could not save step 15: {WHY}\n"
LAST = PLAIN.replace(
    "ValueError: my bad learning rate",
    "gpucloud.domain.errors.StoreError: the final checkpoint, of step 15, could not be committed",
)
LOST = PLAIN.replace("ValueError: my bad learning rate", "RuntimeError: Connection closed by peer [127.0.0.1]:4242")
RESET = PLAIN.replace(
    "ValueError: my bad learning rate", "requests.exceptions.ConnectionError: Connection reset by peer"
)
OF_A_SCRIPT = f"gpucloud: the last checkpoint could not be saved: {WHY}\n"
QUOTA = WHY.replace("No space left on device (free some space", "Disk quota exceeded (free some of your quota")


def failed_report(message: str | None) -> JobReport:
    failed = state(
        job="boom",
        status=JobStatus.FAILED,
        exit_reason=ExitReason.USER_ERROR,
        exit_code=20,
        message=message,
        attempts=(replace(opened("a"), reason=ExitReason.USER_ERROR),),
    )
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal(0), promised_usd=Decimal(0))
    return report(failed, spend, (), NO_GROUP, None)


def test_a_failed_job_ends_with_one_line_that_says_what_to_do() -> None:
    failed = failed_report(message="ModuleNotFoundError: No module named 'apex' (boom.py:3, rank 0)")
    assert report_text(failed).splitlines()[-1] == (
        "boom: failed: ModuleNotFoundError: No module named 'apex' (boom.py:3, rank 0) · gpucloud logs boom"
        " · setup: uv pip install apex · mend it and run the same command:"
        " this run goes on from the beginning, with the 1.00 USD left of its budget"
    )
    assert report_text(failed_report(message=None)).splitlines()[-1] == (
        "boom: failed by its own error · gpucloud logs boom · mend it and run the same command:"
        " this run goes on from the beginning, with the 1.00 USD left of its budget"
    )


@pytest.mark.parametrize(
    ("message", "is_full"),
    [
        (f"rank 0 could not save step 44: {WHY}; then RuntimeError: Connection closed by peer (a.py:3, rank 0)", True),
        (f"rank 1 could not save step 44: {QUOTA}; then RuntimeError: Connection closed by peer", True),
        (f"its last checkpoint is not saved: {WHY}", True),
        ("rank 0 could not save step 4: cannot write a in s3://b: An error (XMinioStorageFull) occurred", True),
        ("rank 0 could not save step 4: cannot write a in s3://b: An error (AccessDenied) occurred", False),
        (f"ConnectionError: Connection reset by peer (a.py:3, rank 0); rank 0 could not save step 44: {WHY}", False),
        ("OSError: [Errno 28] No space left on device: 'out/x' (train.py:3, rank 0)", False),  # of its machine's disk
        ("its last checkpoint is not saved: [Errno 28] No space left on device: '/tmp/x'", False),
        (None, False),
    ],
)
def test_a_job_whose_store_was_full_is_not_told_that_its_script_is_wrong(message, is_full) -> None:
    told = report_text(failed_report(message=message))
    head, last = told.splitlines()[0], told.splitlines()[-1]
    assert head == f"boom: failed, not torn down ({'its store was full' if is_full else 'user_error'})"
    assert ("· free some space in its store and run the same command: this run goes on from" in last) is is_full
    assert ("mend it" in last) is not is_full


def test_output_without_a_space_is_looked_through_once():
    assert without_code_folder("/code/" + "/" * 2_000_000) == "/code/" + "/" * 2_000_000


@pytest.mark.parametrize(
    ("texts", "rank", "failure"),
    [
        (
            {0: UNSAVED + LOST, 1: LOST},
            0,
            "rank 0 could not save step 15: No space left on device; then"
            " RuntimeError: Connection closed by peer [127.0.0.1]:4242 (boom.py:3, rank 0)",
        ),
        ({0: LOST}, 0, "RuntimeError: Connection closed by peer [127.0.0.1]:4242 (boom.py:3, rank 0)"),
        ({0: UNSAVED + PLAIN}, 0, f"{failure_of(PLAIN, 0)}; {UNSAVED[10:-1]}"),
        ({0: UNSAVED + LOST, 1: PLAIN}, 1, f"{failure_of(PLAIN, 1)}; {UNSAVED[10:-1]}"),
        ({0: FULL + RESET}, 0, f"{failure_of(RESET, 0)}; {FULL[10:-1]}"),
        ({0: OF_A_SCRIPT + PLAIN}, 0, f"{failure_of(PLAIN, 0)}; {OF_A_SCRIPT[10:-1]}"),
        ({0: UNSAVED}, 0, None),
        ({0: f"{UNSAVED}{'x' * 9000}\n{LOST}"}, 0, failure_of(LOST, 0)),
        ({0: FULL + LAST}, 0, f"rank 0 could not save step 15: {WHY}; then {failure_of(LAST, 0)}"),
        ({0: f"gpucloud: its last checkpoint is not saved: {WHY}\n"}, 0, f"its last checkpoint is not saved: {WHY}"),
    ],
)
def test_what_could_not_be_saved_stands_before_what_followed_from_it_and_behind_an_error_of_the_scripts_own(
    texts, rank, failure
):
    assert cause(texts, rank) == failure


def test_what_was_saved_since_is_not_told_of_beside_a_scripts_error():
    assert cause({0: UNSAVED + PLAIN}, 0, 15) == failure_of(PLAIN, 0)
    assert cause({0: UNSAVED + PLAIN}, 0, 14) == f"{failure_of(PLAIN, 0)}; {UNSAVED[10:-1]}"


def test_a_connection_of_a_scripts_own_that_broke_is_no_lost_peer():
    assert first_to_fail({0: LOST, 1: RESET}) == 1
    assert first_to_fail({0: LOST, 1: PLAIN}) == 1
    assert first_to_fail({0: LOST, 1: LOST}) == 0


@pytest.mark.parametrize(
    "words",
    [
        "horovod.common.exceptions.HorovodInternalError: [gloo/transport/tcp/pair.cc:589] Connection closed by peer",
        "ValueError: a rank is away: [gloo/transport/tcp/pair.cc:589] Read error",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970",
        "my.Failed: Timed out waiting 1800000ms for recv operation to complete",
    ],
)
def test_who_names_a_lost_peer_in_a_librarys_own_words_is_not_the_cause_whatever_it_raises(words):
    lost = PLAIN.replace("ValueError: my bad learning rate", words)
    assert first_to_fail({0: lost, 1: PLAIN}) == 1
    assert cause({0: UNSAVED + lost}, 0) == f"{UNSAVED[10:-1]}; then {failure_of(lost, 0)}"


def test_of_a_step_that_could_not_be_saved_one_short_line_is_told():
    assert len(unsaved_of(UNSAVED.strip() + "\x1b[2J" + "y" * 5000) or "") == 400
    assert unsaved_of("rank 0 could not save step 15: x") is None
