"""Jobs whose script knows nothing of gpucloud, through the real command line: they go on from their directory."""

from __future__ import annotations

import json
import re

import pytest

from tests.commandline import command_line, until

# As a Trainer does: rank 0 writes a folder in several files, the state last, and the highest number wins on resuming.
SCRIPT = """
import json, os, signal, sys, time

rank, asked = int(os.environ["RANK"]), []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
folders = os.listdir("out") if os.path.isdir("out") else []
step = max((int(name.rpartition("-")[2]) for name in folders), default=0)
if step:
    assert json.load(open(f"out/checkpoint-{step}/trainer_state.json")) == {"global_step": step}
    assert open(f"out/checkpoint-{step}/model.bin").read() == f"weights of {step}"
print("begins at", step, flush=True)

def save():
    if rank == 0:
        os.makedirs(f"out/checkpoint-{step}")
        texts = {"model.bin": f"weights of {step}", "trainer_state.json": json.dumps({"global_step": step})}
        for name, text in texts.items():
            with open(f"out/checkpoint-{step}/{name}", "w") as file:
                file.write(text[:5])
                file.flush()
                time.sleep(0.05)
                file.write(text[5:])

total = step + 40 if step else 6000  # the first attempt runs until something happens to it
while step < total:
    step += 1
    time.sleep(0.05)
    if asked:
        save()
        print("asked at", step, flush=True)
        sys.exit(1)
    if step % 20 == 0 or step == total:
        save()
print("ended at", step, flush=True)
"""

JOB = """\
name: small
code: code
run: train.py
launcher: {launcher}
resources: {{nodes: 2, gpus: {gpus}}}
checkpoint: {{directory: out, on_notice: {on_notice}}}
budget: 3 USD
"""


@pytest.fixture
def line(tmp_path):
    with command_line(tmp_path) as found:
        yield found


def job(line, *, launcher="plain", gpus=1, on_notice="SIGTERM"):
    (line.folder / "code").mkdir()
    (line.folder / "code" / "train.py").write_text(SCRIPT)
    file = line.folder / "small.yaml"
    file.write_text(JOB.format(launcher=launcher, gpus=gpus, on_notice=on_notice))
    return str(file)


def output(line, rank):
    return line.run("logs", "small", "--rank", str(rank)).stdout


def steps_begun_at(text):
    return [int(step) for step in re.findall(r"begins at (\d+)", text)]


def test_on_a_notice_every_ranks_script_is_asked_and_the_next_attempt_begins_with_what_it_saved(line):
    answer = line.run("train", job(line), "--drill", "--json")

    assert answer.code == 0, answer.stderr + output(line, 0)
    told = answer.json
    assert [a["reason"] for a in told["attempts"]] == ["interrupted", "succeeded"]
    assert "whole ones in out/ are kept and put back; a resume is as exact as what your script saves" in answer.stderr
    first = output(line, 0)
    asked = int(re.search(r"asked at (\d+)", first)[1])
    assert steps_begun_at(first) == [0, asked]
    assert told["checkpoint"]["step"] == told["last_step"] == asked + 40
    assert steps_begun_at(output(line, 1)) == [0, asked]  # the directory is put back on every node
    assert f"put back the checkpoint of step {asked}" in first
    assert line.run("status", "small", "--json").json["checkpoint"]["step"] == asked + 40


@pytest.mark.slow  # shows that torchrun's ranks are found, and that a node's silent loss costs no committed save
def test_after_a_silent_loss_the_job_goes_on_from_the_newest_save_that_was_committed(line):
    train = line.start("train", job(line, launcher="torchrun", gpus=2), "--json")
    until(lambda: (line.state() or {}).get("checkpoint"), "a commit", 200)
    line.group.interrupt("gpucloud-small", line.nodes()[0], notice=False)

    assert train.wait(250) == 0, (line.folder / "err").read_text()
    told = json.loads((line.folder / "out").read_text())
    assert [a["reason"] for a in told["attempts"]] == ["lost", "succeeded"]
    begun = max(steps_begun_at(output(line, 3)))
    assert begun >= 20
    assert begun % 20 == 0
    assert told["checkpoint"]["step"] == begun + 40


# As nanoGPT does: from scratch unless its command line says otherwise, one file that is written again and again.
FROM_SCRATCH = """
import os, sys, time, zipfile

resumes = "--init_from=resume" in sys.argv
iter_num = 0
if resumes:
    with zipfile.ZipFile("out/ckpt.pt") as file:
        iter_num = int(file.read("iter_num"))
print("words", *sys.argv[1:], flush=True)
print("begins at", iter_num, flush=True)
os.makedirs("out", exist_ok=True)
total = iter_num + 50 if resumes else 6000
while iter_num < total:
    iter_num += 1
    time.sleep(0.05)
    print(f"iter {iter_num}: loss 2.5, time 50ms", flush=True)
    if iter_num % 50 == 0:  # longer apart than a file must be at rest
        with zipfile.ZipFile("out/ckpt.pt", "w") as file:
            file.writestr("iter_num", str(iter_num))
        print("saved", iter_num, flush=True)
print("ended at", iter_num, flush=True)
"""


@pytest.mark.slow  # test_kept_directory.py tells a script of one node
def test_a_script_that_resumes_only_when_told_is_told_so_after_an_interruption(line):
    file = job(line, on_notice="none")
    (line.folder / "code" / "train.py").write_text(FROM_SCRATCH)
    text = (line.folder / "small.yaml").read_text().replace("nodes: 2", "nodes: 1")
    added = "on_notice: none, resume_args: --init_from=resume"
    text = text.replace("on_notice: none", added).replace("train.py", "train.py --lr=0.1")
    printed = r"metrics: {step: 'iter (\d+):', loss: 'loss ([0-9.]+)', ms: 'time (\d+)ms'}"
    (line.folder / "small.yaml").write_text(f"{text}{printed}\n")
    train = line.start("train", file, "--json")
    until(lambda: (line.state() or {}).get("checkpoint"), "a commit", 200)
    standing = line.run("status", "small").stdout  # its saves tell no step, what it prints does
    assert re.search(r"step \d+, \d+(\.\d+)? steps/s", standing), standing
    assert "checkpoint at save" in standing
    line.group.interrupt("gpucloud-small", line.nodes()[0], notice=True)

    assert train.wait(250) == 0, (line.folder / "err").read_text() + output(line, 0)
    told = json.loads((line.folder / "out").read_text())
    assert [a["reason"] for a in told["attempts"]] == ["interrupted", "succeeded"]
    said = output(line, 0)
    begun = steps_begun_at(said)
    assert begun[0] == 0
    assert begun[1] >= 50
    assert begun[1] % 50 == 0
    assert re.findall(r"words (.*)", said) == ["--lr=0.1", "--lr=0.1 --init_from=resume"]
    assert ", with --init_from=resume\n" in (line.folder / "err").read_text()
    assert "after it, the script gets --init_from=resume" in line.run("status", "small").stdout
    assert told["resume_args"] == ["--init_from=resume"]
    (*_, last) = line.run("status", "small", "--history", "--json").json["history"]
    assert last["spans"][-1]["numbers"] == [["step", float(begun[1] + 50)], ["loss", 2.5], ["ms", 50.0]]


# Each rank saves its own part on its own node, and none waits for another.
PARTS = """
import json, os, time

rank = int(os.environ["RANK"])
folders = os.listdir("out") if os.path.isdir("out") else []
step = max((int(name.rpartition("-")[2]) for name in folders), default=0)
if step:
    assert {json.load(open(f"out/step-{step}/part-{one}.json"))["step"] for one in (0, 1)} == {step}
print("begins at", step, flush=True)
total = step + 40 if step else 6000
while step < total:
    step += 1
    time.sleep(0.05)
    if step % 20 == 0:
        os.makedirs(f"out/step-{step}")
        for name in (f"part-{rank}.json", "DONE"):
            with open(f"out/step-{step}/{name}", "w") as file:
                json.dump({"step": step}, file)
print("ended at", step, flush=True)
"""


@pytest.mark.timeout(900)
@pytest.mark.slow  # shows per_node through the supervisor: agents, orders, a notice, nodes with folders of their own
def test_parts_of_every_node_are_one_checkpoint_and_come_back_together(line):
    file = job(line, on_notice="none")
    (line.folder / "code" / "train.py").write_text(PARTS)
    text = (line.folder / "small.yaml").read_text()
    (line.folder / "small.yaml").write_text(text.replace("on_notice: none", "done_file: DONE, per_node: true"))
    train = line.start("train", file, "--drill", "--json")

    assert train.wait(800) == 0, (line.folder / "err").read_text() + output(line, 0)
    told = json.loads((line.folder / "out").read_text())
    assert [a["reason"] for a in told["attempts"]] == ["interrupted", "succeeded"]
    begun = steps_begun_at(output(line, 0))
    assert begun == steps_begun_at(output(line, 1))
    assert begun[1] >= 20
    assert told["checkpoint"]["step"] == begun[1] + 40
    pulled = line.run("checkpoints", "small", "--pull", str(line.folder / "here"), "--json").json
    assert pulled["files"] == 3
    names = sorted(path.name for path in (line.folder / "here" / f"step-{begun[1] + 40}").iterdir())
    assert names == ["DONE", "part-0.json", "part-1.json"]
