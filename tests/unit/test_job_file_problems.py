"""Every kind of broken job file brings exactly these problems, each with its line and column."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import BaseModel, Field

from gpucloud.adapters.jobfile import read_job, spec_sha256
from gpucloud.adapters.jobfile.document import sections
from gpucloud.domain.errors import JobFileError

HEAD = "name: a\nrun: train.py\nbudget: 1 USD\n"
NODES = "a whole number from 1 to 64, or a range such as 2-4"

BROKEN: list[tuple[str, list[str]]] = [
    ("", ["1:1: the file is empty (gpucloud init writes a sample)"]),
    ("# only a comment\n", ["1:1: the file is empty (gpucloud init writes a sample)"]),
    ("just words\n", ['1:1: a job file is a mapping of keys to values, such as "name: digits"']),
    ("- a\n- b\n", ['1:1: a job file is a mapping of keys to values, such as "name: digits"']),
    ("42\n", ['1:1: a job file is a mapping of keys to values, such as "name: digits"']),
    ("null\n", ['1:1: a job file is a mapping of keys to values, such as "name: digits"']),
    ("name: a\n---\nname: b\n", ["2:1: a second document begins here: one file is one job"]),
    ("name: a\n...\nmore\n", ["3:1: this is not YAML: expected '<document start>', but found '<scalar>'"]),
    ('name: "a\n', ["2:1: a quote is opened and never closed"]),
    ("name: 'a\nrun: b\n", ["3:1: a quote is opened and never closed"]),
    ("name: a\n\trun: b\n", ["2:1: a tab cannot begin a word: YAML is indented with spaces"]),
    ("name: a: b\n", ["1:8: a colon is not expected here: indent it as the line above, or quote the text"]),
    ("name: [a\n", ["2:1: this is not YAML: expected ',' or ']', but got '<stream end>'"]),
    ("{name: a\n", ["2:1: this is not YAML: expected ',' or '}', but got '<stream end>'"]),
    ("name: a\n  run: b\n", ["2:6: a colon is not expected here: indent it as the line above, or quote the text"]),
    ("name: @a\n", ["1:7: this is not YAML: found character '@' that cannot start any token"]),
    ("name: a\nrun\nbudget: 1 USD\n", ["3:1: a colon is missing after the key above this line"]),
    (
        "%YAML 9.0\n---\nname: a\n",
        ["1:1: this is not YAML: found incompatible YAML document (version 1.* is required)"],
    ),
    ("name: a\x00b\n", ["1:8: a character that text does not have: U+0000"]),
    ("name: a\x1b[31m\n", ["1:8: a character that text does not have: U+001B"]),
    ('name: "\\U00110000"\n', ["1:10: this cannot be read as YAML"]),
    ('name: "\\q"\n', ["1:9: this is not YAML: found unknown escape character 'q'"]),
    (
        "a: [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]\n",
        ["1:15: nested more than 12 deep"],
    ),
    ("a: {b: {c: {d: {e: {f: {g: {h: {i: {j: {k: {l: {m: {n: 1}}}}}}}}}}}}}\n", ["1:48: nested more than 12 deep"]),
    ("name: a\n", ["1:1: run: is required", "1:1: budget: is required"]),
    ("{}\n", ["1:1: name: is required", "1:1: run: is required", "1:1: budget: is required"]),
    (HEAD + "bugdet: 2 USD\n", ['4:1: bugdet: is not a key here (did you mean "budget"?)']),
    (HEAD + "nodes: 4\n", ['4:1: nodes: is not a key here (did you mean "resources.nodes"?)']),
    (HEAD + "keep: 4\n", ['4:1: keep: is not a key here (did you mean "checkpoint.keep"?)']),
    (HEAD + "zzz: 1\n", ["4:1: zzz: is not a key here"]),
    (HEAD + "resources: {gpuss: 1}\n", ['4:13: resources.gpuss: is not a key here (did you mean "gpus"?)']),
    (HEAD + "resources: {budget: 1}\n", ['4:13: resources.budget: is not a key here (did you mean "budget"?)']),
    (HEAD + "resources: {gpu_count: 2}\n", ['4:13: resources.gpu_count: is not a key here (did you mean "gpus"?)']),
    (HEAD + "node_count: 2\n", ['4:1: node_count: is not a key here (did you mean "resources.nodes"?)']),
    (
        HEAD + "checkpoint: {directory: out, resume_args: --from {checkpoint}}\n",
        ["4:50: a brace is not expected here: quote the text that has it"],
    ),
    (HEAD + "checkpoint:\n  evry: auto\n", ['5:3: checkpoint.evry: is not a key here (did you mean "every"?)']),
    (HEAD + "name: b\n", ["4:1: name: is there twice, first on line 1"]),
    (HEAD + "env: {A: 1, A: 2}\n", ["4:13: env.A: is there twice, first on line 4"]),
    (HEAD + "1: x\n", ["4:1: 1: is not a key here"]),
    (HEAD + "no: x\n", ["4:1: no: is not a key here"]),
    (HEAD + "? [a]\n: b\n", ["4:3: a key must be a word"]),
    (HEAD + "? {a: b}\n: c\n", ["4:3: a key must be a word"]),
    (HEAD + "<<: {cloud: aws}\n", ["4:1: << merges another mapping, which is not read here: write the keys out"]),
    (HEAD + "Cloud: aws\n", ['4:1: Cloud: is not a key here (did you mean "cloud"?)']),
    (
        HEAD + "env: &e {A: 1}\ntags: *e\n",
        [
            "4:6: env: &e is an anchor, which is not read here: remove it",
            "5:7: tags: *e is an alias, which is not read here: write the value out",
        ],
    ),
    (
        HEAD + "setup: !!python/object/apply:os.system [id]\n",
        ["4:8: setup: a value with a YAML tag (!…) is not read here: remove the tag"],
    ),
    (HEAD + "setup: !secret x\n", ["4:8: setup: a value with a YAML tag (!…) is not read here: remove the tag"]),
    (HEAD + "*name : x\n", ["4:1: a key must be a word"]),
    (
        HEAD + "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
        [
            "4:4: a: &a is an anchor, which is not read here: remove it",
            "5:4: b: &b is an anchor, which is not read here: remove it",
            "5:8: b[0]: *a is an alias, which is not read here: write the value out",
            "5:12: b[1]: *a is an alias, which is not read here: write the value out",
            "6:1: c: is not a key here",
            "6:5: c[0]: *b is an alias, which is not read here: write the value out",
            "6:9: c[1]: *b is an alias, which is not read here: write the value out",
        ],
    ),
    (HEAD + "store:\n", ["4:1: store: has no value: write one, or remove the key"]),
    (HEAD + "setup: ~\n", ["4:1: setup: has no value: write one, or remove the key"]),
    (HEAD + "resources:\n", ["4:1: resources: has no value: write one, or remove the key"]),
    (HEAD + "secrets: [A, ]\ngpu: \n", ["5:1: gpu: has no value: write one, or remove the key"]),
    (HEAD + "outputs:\n  -\n  - a\n", ["5:4: outputs[0]: has no value: write one, or remove the key"]),
    (HEAD + "env: {A: }\n", ["4:7: env.A: has no value: write one, or remove the key"]),
    (
        "name: My Job!\nrun: train.py\nbudget: 1 USD\n",
        ['1:7: name: "My Job!" is not a name: a–z, 0–9 and hyphens inside, at most 40 (did you mean "my-job"?)'],
    ),
    (
        "name: -a\nrun: train.py\nbudget: 1 USD\n",
        ['1:7: name: "-a" is not a name: a–z, 0–9 and hyphens inside, at most 40 (did you mean "a"?)'],
    ),
    (
        "name: " + "a" * 41 + "\nrun: train.py\nbudget: 1 USD\n",
        [
            f'1:7: name: "{"a" * 39}…" is not a name: a–z, 0–9 and hyphens inside, at most 40'
            f' (did you mean "{"a" * 40}"?)'
        ],
    ),
    (
        "name: no\nrun: train.py\nbudget: 1 USD\n",
        ['1:7: name: must be text, not no (without quotes it means yes or no in YAML: write "no")'],
    ),
    ("name: [a]\nrun: train.py\nbudget: 1 USD\n", ["1:7: name: must be text, not a list"]),
    ('name: ""\nrun: train.py\nbudget: 1 USD\n', ["1:7: name: is empty"]),
    (
        'name: "!"\nrun: train.py\nbudget: 1 USD\n',
        ['1:7: name: "!" is not a name: a–z, 0–9 and hyphens inside, at most 40'],
    ),
    (
        "name: a\nrun: train.py\nbudget: 20\n",
        ['3:9: budget: "20" is not a sum of money (did you mean "20 USD"?)'],
    ),
    ("name: a\nrun: train.py\nbudget: 0 USD\n", ["3:9: budget: must be more than 0 USD"]),
    (
        "name: a\nrun: train.py\nbudget: 20 EUR\n",
        ['3:9: budget: "20 EUR" is not a sum of money: write it like "20 USD" or "0.5 USD"'],
    ),
    (
        "name: a\nrun: train.py\nbudget: 200000000 USD\n",
        ['3:9: budget: "200000000 USD" is too much: the most is 100000000 USD'],
    ),
    ("name: a\nrun: train.py\nbudget: {usd: 1}\n", ["3:9: budget: must be text, not a mapping"]),
    (
        "name: a\nrun: trian.py --lr 1\nbudget: 1 USD\n",
        ['2:6: run: there is no script "trian.py" in the code folder (did you mean "train.py"?)'],
    ),
    ("name: a\nrun: ../train.py\nbudget: 1 USD\n", ['2:6: run: "../train.py" is not a script inside the code folder']),
    ("name: a\nrun: train.py 'x\nbudget: 1 USD\n", ['2:6: run: "train.py \'x" has a quote that is never closed']),
    ("name: a\nrun: [train.py]\nbudget: 1 USD\n", ["2:6: run: must be text, not a list"]),
    ('name: a\nrun: "train.py\\0"\nbudget: 1 USD\n', ['2:6: run: "train.py�" holds the control character U+0000']),
    (HEAD + "cloud: asw\n", ['4:8: cloud: "asw" is not one of local, aws, ssh (did you mean "aws"?)']),
    (
        HEAD + "cloud: gcp\n",
        ['4:8: cloud: "gcp" is not one of local, aws, ssh (machines that you rent elsewhere: `cloud: ssh`)'],
    ),
    (
        HEAD + "cloud: aws\nstore: ./here\n",
        ["5:8: store: must be s3://bucket/prefix for cloud: aws, since nodes cannot reach a folder here"],
    ),
    (
        HEAD + "cloud: aws\naws: {kms_key: alias/mine}\n",
        [
            '5:16: aws.kms_key: "alias/mine" is an alias: write the key\'s id or ARN'
            " (aws kms describe-key --key-id alias/mine --query KeyMetadata.Arn)"
        ],
    ),
    (
        HEAD + "aws:\n  kms_key: arn:aws:kms:us-east-1:123456789012:alias/mine\n",
        [
            '5:12: aws.kms_key: "arn:aws:kms:us-east-1:123456789012:alia…" is an alias: write the key\'s id or ARN'
            " (aws kms describe-key --key-id alias/mine --query KeyMetadata.Arn)"
        ],
    ),
    (
        HEAD + "aws: {kms_key: arn:aws:s3:::mine}\n",
        ['4:16: aws.kms_key: "arn:aws:s3:::mine" is not a key: write the key\'s id or ARN'],
    ),
    (HEAD + "code: nowhere\n", ['4:7: code: there is no folder "nowhere" beside the job file']),
    (HEAD + "code: train.py\n", ['4:7: code: there is no folder "train.py" beside the job file']),
    (HEAD + 'code: "a\\nb"\n', ['4:7: code: "a�b" is more than one line']),
    (
        HEAD + "store: s3:/bucket\nstore2: x\n",
        [
            '4:8: store: "s3:/bucket" is not a place: write s3://bucket/prefix or a folder',
            '5:1: store2: is not a key here (did you mean "store"?)',
        ],
    ),
    (
        HEAD + "store: gs://bucket/x\n",
        ['4:8: store: "gs://bucket/x" is not a place: write s3://bucket/prefix or a folder'],
    ),
    (HEAD + "store: s3://B/x\n", ['4:8: store: "s3://B/x" is not a place: write s3://bucket/prefix or a folder']),
    (
        HEAD + "store: s3://bucket//x\n",
        ['4:8: store: "s3://bucket//x" is not a place: write s3://bucket/prefix or a folder'],
    ),
    (HEAD + "resources: {nodes: 0}\n", [f"4:20: resources.nodes: must be {NODES}, not 0"]),
    (HEAD + "resources: {nodes: 65}\n", [f"4:20: resources.nodes: must be {NODES}, not 65"]),
    (HEAD + "resources: {nodes: two}\n", [f"4:20: resources.nodes: must be {NODES}, not two"]),
    (
        HEAD + 'resources: {nodes: "2"}\n',
        [f'4:20: resources.nodes: must be {NODES}, not "2" (remove the quotes)'],
    ),
    (HEAD + "resources: {nodes: 2.0}\n", [f"4:20: resources.nodes: must be {NODES}, not 2.0"]),
    (HEAD + "resources: {nodes: yes}\n", [f"4:20: resources.nodes: must be {NODES}, not yes"]),
    (HEAD + "resources: {gpus: 17}\n", ["4:19: resources.gpus: must be a whole number from 1 to 16, not 17"]),
    (HEAD + "resources: {gpus: [1]}\n", ["4:19: resources.gpus: must be a whole number from 1 to 16, not a list"]),
    (HEAD + "resources: 2\n", ["4:12: resources: must be a mapping of keys to values, not 2"]),
    (
        HEAD + "resources: {nodes: 4-2}\n",
        ['4:20: resources.nodes: "4-2" is no range: the smaller number comes first (write 2-4)'],
    ),
    (
        HEAD + "resources: {nodes: 3-3}\n",
        ['4:20: resources.nodes: "3-3" is no range: the smaller number comes first (write 3)'],
    ),
    (HEAD + "resources: {nodes: 0-3}\n", ['4:20: resources.nodes: "0-3" is not within 1 to 64']),
    (HEAD + "resources: {nodes: 2-65}\n", ['4:20: resources.nodes: "2-65" is not within 1 to 64']),
    (
        HEAD + "resources: {nodes: x-3}\n",
        [f"4:20: resources.nodes: must be {NODES}, not x-3"],
    ),
    (
        HEAD + "checkpoint: {directory: out, layout: dcp}\nresources: {nodes: 1-2}\n",
        [
            "4:38: checkpoint.layout: each of several nodes writes a part of its own, and node 0's alone is kept: "
            "add `per_node: true`"
        ],
    ),
    (HEAD + "resources: [nodes]\n", ["4:12: resources: must be a mapping of keys to values, not a list"]),
    (HEAD + "resources: {gpu: {A100: 1}}\n", ["4:18: resources.gpu: must be a list, not a mapping"]),
    (
        HEAD + "resources: {gpu: [A100, on]}\n",
        ['4:25: resources.gpu[1]: must be text, not on (without quotes it means yes or no in YAML: write "on")'],
    ),
    (HEAD + "resources: {gpu: [A100, A100]}\n", ['4:18: resources.gpu: "A100" is there twice']),
    (HEAD + 'resources: {gpu: "*"}\n', ['4:18: resources.gpu: "*" is not the name of a GPU, such as A100']),
    (
        HEAD + "resources: {vram_gib: 80 GB}\n",
        ['4:23: resources.vram_gib: "80 GB" is not a whole number of GiB: write it like "40 GiB"'],
    ),
    (HEAD + "resources: {vram_gib: 0}\n", ["4:23: resources.vram_gib: must be from 1 to 4096 GiB"]),
    (
        HEAD + "resources: {vram_gib: lots}\n",
        ['4:23: resources.vram_gib: "lots" is not a size: write it like "40 GiB" or "512 MiB"'],
    ),
    (
        HEAD + "resources: {market: sopt}\n",
        ['4:21: resources.market: "sopt" is not one of spot, on_demand, auto (did you mean "spot"?)'],
    ),
    (
        HEAD + "resources: {market: on-demand}\n",
        ['4:21: resources.market: "on-demand" is not one of spot, on_demand, auto (did you mean "on_demand"?)'],
    ),
    (
        HEAD + "resources: {regions: [US West]}\n",
        ['4:23: resources.regions[0]: "US West" is not a region, such as us-west-2'],
    ),
    (
        HEAD + "checkpoint: {every: 10}\n",
        ['4:21: checkpoint.every: "10" is not auto, a span of time such as "10 min", or "100 steps"'],
    ),
    (
        HEAD + "checkpoint: {every: atuo}\n",
        [
            '4:21: checkpoint.every: "atuo" is not auto, a span of time such as "10 min", or "100 steps"'
            ' (did you mean "auto"?)'
        ],
    ),
    (
        HEAD + "checkpoint: {every: 0 steps}\n",
        ['4:21: checkpoint.every: "0 steps" is not auto, a span of time such as "10 min", or "100 steps"'],
    ),
    (HEAD + "checkpoint: {keep: 1}\n", ["4:20: checkpoint.keep: must be a whole number from 2 to 1000, not 1"]),
    (
        HEAD + "checkpoint: {directory: /scratch}\n",
        ['4:25: checkpoint.directory: "/scratch" is not a path inside the code folder'],
    ),
    (
        HEAD + "checkpoint: {directory: a/../../b}\n",
        ['4:25: checkpoint.directory: "a/../../b" is not a path inside the code folder'],
    ),
    (
        HEAD + "checkpoint: {directory: .gpucloud-x}\n",
        ["4:25: checkpoint.directory: names that begin with .gpucloud- are gpucloud's own"],
    ),
    (
        HEAD + "checkpoint: {directroy: out}\n",
        ['4:14: checkpoint.directroy: is not a key here (did you mean "directory"?)'],
    ),
    (HEAD + "directory: out\n", ['4:1: directory: is not a key here (did you mean "checkpoint.directory"?)']),
    (
        HEAD + "checkpoint: {directory: out, layout: lightening}\n",
        [
            '4:38: checkpoint.layout: "lightening" is not one of auto, hf, lightning, dcp, deepspeed, megatron, file'
            ' (did you mean "lightning"?)'
        ],
    ),
    (
        HEAD + "checkpoint: {directory: out, on_notice: usr1}\n",
        ['4:41: checkpoint.on_notice: "usr1" is not one of none, SIGTERM, SIGUSR1 (did you mean "SIGUSR1"?)'],
    ),
    (
        HEAD + "checkpoint: {directory: out, on_notice: SIGKILL}\n",
        ['4:41: checkpoint.on_notice: "SIGKILL" is not one of none, SIGTERM, SIGUSR1'],
    ),
    (
        HEAD + "checkpoint: {directory: out, done_file: a/DONE}\n",
        ['4:41: checkpoint.done_file: "a/DONE" is not the name of a file: it is looked for in every folder'],
    ),
    (
        HEAD + "checkpoint: {directory: out, done_file: DONE, layout: hf}\n",
        ['4:41: checkpoint.done_file: is in place of a layout, and "hf" is named'],
    ),
    (
        HEAD + "checkpoint: {resume_args: --resume}\n",
        ["4:14: checkpoint.resume_args: is of a script's own `directory`, and none is named"],
    ),
    (
        HEAD + "checkpoint: {directory: out, resume_args: []}\n",
        ["4:43: checkpoint.resume_args: is empty"],
    ),
    (
        HEAD + "checkpoint: {directory: out, resume_args: --at 'a}\n",
        ['4:43: checkpoint.resume_args: "--at \'a" has a quote that is never closed'],
    ),
    (
        HEAD + 'checkpoint: {directory: out, resume_args: "--at {Checkpoints}"}\n',
        [
            '4:43: checkpoint.resume_args: "{Checkpoints}" stands for nothing (did you mean "{checkpoint}"?)',
        ],
    ),
    (
        HEAD + 'checkpoint: {directory: out, resume_variables: {PATH: "{checkpoint}", RANK: 1}}\n',
        [
            "4:49: checkpoint.resume_variables.PATH: is what programs are started by: not there",
            "4:71: checkpoint.resume_variables.RANK: RANK is set by gpucloud",
        ],
    ),
    (
        "name: a\nrun: cd x && python t.py -a 1 2>&1 | tee log\nbudget: 1 USD\n"
        "checkpoint: {directory: out, resume_args: --go}\n",
        [
            "4:43: checkpoint.resume_args: a shell reads `run`, which must say $GPUCLOUD_RESUME_ARGS where they belong"
            " (run: cd x && python t.py -a 1 $GPUCLOUD_RESUME_ARGS 2>&1 | tee log)"
        ],
    ),
    (
        "name: a\nrun: python t.py $RESUME_ARGS\nbudget: 1 USD\ncheckpoint: {directory: out, resume_args: --go}\n",
        [
            "4:43: checkpoint.resume_args: a shell reads `run`, which must say $GPUCLOUD_RESUME_ARGS where they belong"
            " ($GPUCLOUD_RESUME_ARGS in place of $RESUME_ARGS)"
        ],
    ),
    (
        'name: a\nrun: python t.py "$GPUCLOUD_RESUME_ARGS"\nbudget: 1 USD\n'
        "checkpoint: {directory: out, resume_args: --go}\n",
        ["2:6: run: $GPUCLOUD_RESUME_ARGS is several words, or none: it stands there without quotes"],
    ),
    (
        "name: a\nrun: python t.py $GPUCLOUD_RESUME_ARGS\nbudget: 1 USD\n"
        "checkpoint: {directory: out, resume_args: [--at, a b]}\n",
        ['4:43: checkpoint.resume_args: "a b" is no word that a shell would leave as it is'],
    ),
    (
        HEAD + "metrics: {step: 'iter', 1x: '(a)', loss: '(a+)+', lr: 'lr (\\d'}\n",
        [
            '4:17: metrics.step: "iter" must have one group, the number: (\\d+) (others are written (?:…))',
            '4:25: metrics.1x: "1x" is not the name of a metric, such as loss',
            '4:42: metrics.loss: "(a+)+" repeats what repeats itself: that can take for ever on one line',
            '4:55: metrics.lr: "lr (\\d" is no regular expression: missing ), unterminated subpattern at position 3',
        ],
    ),
    (
        HEAD + "metrics: {" + ", ".join(f"n{n}: '({n})'" for n in range(17)) + "}\n",
        ["4:1: metrics: are 17 patterns: there may be 16"],
    ),
    (HEAD + "checkpoint: {directory: out, settle: 0s}\n", ["4:38: checkpoint.settle: must be at least 1s"]),
    (
        HEAD + "checkpoint: {directory: out, every: 10 min}\n",
        ["4:37: checkpoint.every: cannot be with `directory`: there the script decides when it saves"],
    ),
    (
        HEAD + "checkpoint: {layout: hf, settle: 2s}\n",
        [
            "4:14: checkpoint.layout: is of a script's own `directory`, and none is named",
            "4:26: checkpoint.settle: is of a script's own `directory`, and none is named",
        ],
    ),
    (
        HEAD + "checkpoint: {directory: out, layout: dcp}\nresources: {nodes: 2}\n",
        [
            "4:38: checkpoint.layout: each of several nodes writes a part of its own, and node 0's alone is kept: "
            "add `per_node: true`"
        ],
    ),
    (
        HEAD + "checkpoint: {directory: out, layout: file, per_node: true}\n",
        [
            "4:54: checkpoint.per_node: needs folders whose names end with the step, and `layout: file` is of "
            "single files"
        ],
    ),
    (HEAD + "checkpoint: often\n", ["4:13: checkpoint: must be a mapping of keys to values, or none, not often"]),
    (
        HEAD + "deadline: 12\n",
        ['4:11: deadline: "12" is not a span of time: write it like "12h", "90 min", "30s" or "2d 3h"'],
    ),
    (HEAD + "deadline: 0s\n", ["4:11: deadline: must be at least 1s"]),
    (
        HEAD + "deadline: 2d 3d\n",
        ['4:11: deadline: "2d 3d" is not a span of time: write it like "12h", "90 min", "30s" or "2d 3h"'],
    ),
    (HEAD + "deadline: 400d\n", ['4:11: deadline: "400d" is too long: the longest span is 366d']),
    (
        HEAD + "deadline: 1:30\n",
        ['4:11: deadline: "1:30" is not a span of time: write it like "12h", "90 min", "30s" or "2d 3h"'],
    ),
    (HEAD + "work: 0 h\n", ["4:7: work: must be at least 1s"]),
    (
        HEAD + "deadline: 9h\npolicy: greed\n",
        [
            '5:9: policy: "greed" is not one of auto, learned, uniform, greedy, on_demand (did you mean "greedy"?)',
        ],
    ),
    (
        HEAD + "aws:\n  subnets: [subnet-0a1b2c3d]\n  alert_email: me@example.com\n",
        [
            "6:3: aws.alert_email: is made with gpucloud's own network alone, and `subnets` names yours"
            " (leave it out, and make a budget in AWS's Billing console)"
        ],
    ),
    (HEAD + "policy: greedy\n", ["4:1: policy: is how a `deadline` is kept, and there is none"]),
    (
        HEAD + "deadline: 9h\npolicy: greedy\nresources: {market: spot}\n",
        ["5:1: policy: chooses between markets, and `market: spot` leaves one: auto"],
    ),
    (HEAD + "model: 7B\n", ["4:8: model: must be a mapping of keys to values, not 7B"]),
    (HEAD + "model: {strategy: fsdp}\n", ["4:8: model.params: is required"]),
    (HEAD + "params: 7B\n", ['4:1: params: is not a key here (did you mean "model.params"?)']),
    (
        HEAD + "model: {params: 7 billion}\n",
        ['4:17: model.params: "7 billion" is not a number of things: write it like "7B", "350M" or "1024"'],
    ),
    (
        HEAD + "model: {params: 0}\n",
        ['4:17: model.params: "0" is not a whole number from 1 to 10^18'],
    ),
    (
        HEAD + "model: {params: 7B, precision: bf61}\n",
        ['4:32: model.precision: "bf61" is not one of bf16, fp16, fp32, fp8 (did you mean "bf16"?)'],
    ),
    (
        HEAD + "model: {params: 7B, batch: 4, recompute: true}\n",
        [
            "4:21: model.batch: is of activations, which are counted when `seq` is named",
            "4:31: model.recompute: is of activations, which are counted when `seq` is named",
        ],
    ),
    (HEAD + "conda: env.yml\n", ['4:8: conda: there is no file "env.yml" in the code folder']),
    (HEAD + "conda: ../e.yml\n", ['4:8: conda: "../e.yml" is not a file inside the code folder']),
    (HEAD + "data: s3://b/x\n", ["4:7: data: must be a mapping of keys to values, not s3://b/x"]),
    (
        HEAD + "data: {s3://bkt/x: data}\n",
        ['4:20: data["s3://bkt/x"]: "data" is not an absolute path on the nodes, such as /data'],
    ),
    (
        HEAD + "data: {s3://bkt/x: /a/../b}\n",
        ['4:20: data["s3://bkt/x"]: "/a/../b" is not an absolute path on the nodes, such as /data'],
    ),
    (
        HEAD + "data: {gs://b/x: /data}\n",
        ['4:8: data["gs://b/x"]: "gs://b/x" is not a place: write s3://bucket/prefix or a folder'],
    ),
    (
        HEAD + "data: {nowhere: /data}\n",
        ['4:8: data.nowhere: there is no file or folder "nowhere" beside the job file'],
    ),
    (
        HEAD + "data:\n  s3://bkt/a: /data\n  s3://bkt/b: /data/\n",
        ['6:15: data["s3://bkt/b"]: "/data/" is taken by "s3://bkt/a"'],
    ),
    (HEAD + "data: {s3://bkt/x: [/a]}\n", ['4:20: data["s3://bkt/x"]: must be text, not a list']),
    (HEAD + "outputs: [/etc]\n", ['4:11: outputs[0]: "/etc" is not a path inside the code folder']),
    (HEAD + "outputs: [a, ../b]\n", ['4:14: outputs[1]: "../b" is not a path inside the code folder']),
    (HEAD + "outputs: ~/x\n", ['4:10: outputs: "~/x" is not a path inside the code folder']),
    (HEAD + "outputs: {a: b}\n", ["4:10: outputs: must be a list, not a mapping"]),
    (HEAD + "tags: [a]\n", ["4:7: tags: must be a mapping of keys to values, not a list"]),
    (HEAD + "tags: {aws:x: 1}\n", ['4:8: tags["aws:x"]: "aws:x" begins with a reserved prefix']),
    (
        HEAD + "tags: {a: yes}\n",
        ['4:11: tags.a: must be text, not yes (without quotes it means yes or no in YAML: write "yes")'],
    ),
    (HEAD + "tags: {a: {b: c}}\n", ["4:11: tags.a: must be text, not a mapping"]),
    (HEAD + "env: {1A: x}\n", ['4:7: env.1A: "1A" is not the name of an environment variable']),
    (HEAD + "env: {RANK: 0}\n", ["4:7: env.RANK: RANK is set by gpucloud"]),
    (HEAD + "env: {GPUCLOUD_HOME: /x}\n", ["4:7: env.GPUCLOUD_HOME: GPUCLOUD_HOME is set by gpucloud"]),
    (
        HEAD + "env: {DEBUG: on}\n",
        ['4:14: env.DEBUG: must be text, not on (without quotes it means yes or no in YAML: write "on")'],
    ),
    (HEAD + "env: [A=1]\n", ["4:6: env: must be a mapping of keys to values, not a list"]),
    (HEAD + "secrets: [hf_token]\n", ['4:11: secrets[0]: "hf_token" is not the name of a secret: A–Z, 0–9 and _']),
    (HEAD + "secrets: HF TOKEN\n", ['4:10: secrets: "HF TOKEN" is not the name of a secret: A–Z, 0–9 and _']),
    (HEAD + "secrets: [A, A]\n", ['4:10: secrets: "A" is there twice']),
    (
        HEAD + "image: a\nconda: e.yml\n",
        ["5:8: conda: cannot be with `image`: put it into the image, where every node finds it"],
    ),
    (
        HEAD + "image: a\nsetup: pip install b\n",
        ["5:8: setup: cannot be with `image`: put it into the image, where every node finds it"],
    ),
    (
        HEAD + "image: a\ncontainer: {login: PASS}\nsecrets: [TOKEN]\n",
        ['5:20: container.login: "PASS" is not in `secrets`: add it there'],
    ),
    (
        "name: a\nrun: ./a.out\nbudget: 1 USD\nlauncher: torchrun\nsetup: make\n",
        ["4:11: launcher: torchrun starts a Python script, and `run` is a command line: plain or mpi"],
    ),
    (HEAD + "env: {A: 1}\nsecrets: [A]\n", ['5:11: secrets[0]: "A" is in env too: keep it in one of them']),
    (HEAD + "hold: 5s\n", ["4:7: hold: must be from 1min to 1h, or none"]),
    (
        HEAD + "hold: never\n",
        ['4:7: hold: "never" is no time to wait: from 1min to 1h, or none (did you mean "none"?)'],
    ),
    (HEAD + "hold: 0\n", ['4:7: hold: "0" is no time to wait: from 1min to 1h, or none (did you mean "none"?)']),
    (HEAD + "hold: 0.5min\n", ["4:7: hold: must be from 1min to 1h, or none"]),
    (
        HEAD + "checkpoint: {none: true}\n",
        ["4:14: checkpoint.none: is not a key here (without braces: `checkpoint: none`)"],
    ),
    (HEAD + "secrets: {A: 1}\n", ["4:10: secrets: must be a list, not a mapping"]),
    (
        "nmae: a\nrun: trian.py\nbudget: 5\nresources:\n  nodes: none\n  market: cheap\ndeadline: soon\n",
        [
            "1:1: name: is required",
            '1:1: nmae: is not a key here (did you mean "name"?)',
            '2:6: run: there is no script "trian.py" in the code folder (did you mean "train.py"?)',
            '3:9: budget: "5" is not a sum of money (did you mean "5 USD"?)',
            f"5:10: resources.nodes: must be {NODES}, not none",
            '6:11: resources.market: "cheap" is not one of spot, on_demand, auto',
            '7:11: deadline: "soon" is not a span of time: write it like "12h", "90 min", "30s" or "2d 3h"',
        ],
    ),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(data: bytes) -> list[str]:
    path = Path("job.yaml")
    path.write_bytes(data)
    with pytest.raises(JobFileError) as caught:
        read_job(path)
    return [str(problem).removeprefix("job.yaml:") for problem in caught.value.problems]


@pytest.mark.parametrize(("text", "expected"), BROKEN, ids=[repr(text)[-40:] for text, _ in BROKEN])
def test_a_broken_file_is_explained(folder: Path, text: str, expected: list[str]) -> None:
    assert problems(text.encode()) == expected


def test_bytes_that_are_not_utf_8_are_placed(folder: Path) -> None:
    assert problems(b"name: a\nrun: \xe9\n") == ["2:6: byte 0xE9 is not UTF-8"]


def test_a_huge_file_is_refused_unread(folder: Path) -> None:
    assert problems(b"a: b\n" * 20_000) == ["1:1: is larger than 64 KiB: is this a job file?"]


def test_nesting_as_deep_as_the_file_is_long_is_refused(folder: Path) -> None:
    assert problems(b"[" * (64 * 1024)) == ["1:13: nested more than 12 deep"]


def test_a_bomb_of_aliases_does_not_grow(folder: Path) -> None:
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    found = problems("\n".join(lines).encode())
    assert "2:10: a1[0]: *a0 is an alias, which is not read here: write the value out" in found


def test_a_missing_file_says_how_to_get_one(folder: Path) -> None:
    with pytest.raises(
        JobFileError, match=r"^nowhere\.yaml:1:1: there is no such file \(gpucloud init writes a sample\)$"
    ):
        read_job(Path("nowhere.yaml"))
    with pytest.raises(JobFileError, match="there is no such file"):
        spec_sha256(Path("nowhere.yaml"))


def test_what_is_not_a_file_is_not_opened(folder: Path) -> None:
    os.mkfifo("job.yaml")
    for path in (Path("job.yaml"), folder):
        with pytest.raises(JobFileError, match=":1:1: is not a file"):
            read_job(path)


def test_the_error_has_exit_code_2_and_names_each_problem_once(folder: Path) -> None:
    Path("job.yaml").write_text("name: a\n")
    with pytest.raises(JobFileError) as caught:
        read_job(Path("job.yaml"))
    assert caught.value.exit_code == 2
    assert caught.value.message == "job.yaml:1:1: run: is required\njob.yaml:1:1: budget: is required"


def test_of_very_many_problems_the_first_twenty_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    file = tmp_path / "job.yaml"
    file.write_text(HEAD + "".join(f"zz{n}: 1\n" for n in range(25)))
    with pytest.raises(JobFileError) as caught:
        read_job(file)
    assert len(caught.value.problems) == 25
    assert str(caught.value).splitlines()[19:] == [f"{file}:23:1: zz19: is not a key here", "… and 5 more problems"]


def test_a_very_long_key_is_not_repeated_whole(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    file = tmp_path / "job.yaml"
    file.write_text(HEAD + "z" * 900 + ": 1\n")
    with pytest.raises(JobFileError) as caught:
        read_job(file)
    assert str(caught.value) == f'{file}:4:1: ["{"z" * 39}…"]: is not a key here'


def test_a_script_line_that_needs_a_shell_is_refused_where_it_stands(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    file = tmp_path / "job.yaml"
    file.write_text("name: a\nbudget: 1 USD\nrun: train.py > log\n")
    with pytest.raises(JobFileError, match=r':3:6: run: "train.py > log": a script gets no shell'):
        read_job(file)


@pytest.fixture
def code(folder: Path) -> Path:
    """A folder with a script, a program that may be executed and one that may not, and a package of its own."""
    for name in ("go.sh", "run/all.sh", "net/__init__.py", "net/train.py", "plain/train.py", "old/train.py"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (folder / "run" / "all.sh").chmod(0o755)
    (folder / ".gitignore").write_text("old/\n")
    (folder / "run" / ".gpucloudignore").write_text("kept.py\n")
    (folder / "run" / "kept.py").touch()
    return folder


_NEAR = 'there is no file "{}" in the code folder (did you mean "{}"?)'.format
_HOME = '"{}" is not sent to machines: {} keeps it here (take it out of {})'.format
_NOT_THERE = [
    ("python trian.py", _NEAR("trian.py", "train.py")),
    ("python3.11 -u -W ignore trian.py --lr 1", _NEAR("trian.py", "train.py")),
    ("torchrun --nproc_per_node 4 trian.py", _NEAR("trian.py", "train.py")),
    ("accelerate launch --config_file a.yaml net/trian.py", _NEAR("net/trian.py", "net/train.py")),
    ("mpirun -np 4 python trian.py", _NEAR("trian.py", "train.py")),
    ("env LR=1 python trian.py", _NEAR("trian.py", "train.py")),
    ("bash og.sh", _NEAR("og.sh", "go.sh")),
    ("bash -eu run/al.sh", _NEAR("run/al.sh", "run/all.sh")),
    ("./run/al.sh", _NEAR("./run/al.sh", "./run/all.sh")),
    ("./trainer", 'there is no file "./trainer" in the code folder (`code:` names its folder)'),
    ("gone.sh", _NEAR("gone.sh", "go.sh")),
    ("python -m net.trian", _NEAR("net/trian.py", "net/train.py")),
    ("torchrun -m net.trian", _NEAR("net/trian.py", "net/train.py")),
    ("go.sh --lr 1", '"go.sh" is a file here, and without a path is looked for as a command (run: bash go.sh --lr 1)'),
    ("./go.sh", '"./go.sh" may not be executed (chmod +x ./go.sh)'),
    ("old/train.py", _HOME("old/train.py", ".gitignore", ".gitignore")),
    ("python ./old/train.py", _HOME("./old/train.py", ".gitignore", ".gitignore")),
    ("python run/kept.py", _HOME("run/kept.py", "run/.gpucloudignore", "run/.gpucloudignore")),
]


@pytest.mark.parametrize(("run", "expected"), _NOT_THERE)
def test_a_line_whose_file_is_on_no_machine_is_refused_where_it_stands(code: Path, run: str, expected: str) -> None:
    assert problems(f"name: a\nrun: {run}\nbudget: 1 USD\n".encode()) == [f"2:6: run: {expected}"]


@pytest.mark.parametrize(
    "run",
    [
        *("python train.py", "python -m net.train", "torchrun --standalone -m net.train", "./run/all.sh", "bash go.sh"),
        *("python -m plain.gone", "python -m torch.distributed.run gone.py", "python -m gone", "python -c 'x.py'"),
        *("python /opt/gone.py", "/opt/gone.sh", "bash ~/gone.sh", "cd run && python gone.py", "bash gone", "gone"),
        *("python $WHERE/gone.py", "python ${WHERE}.py", "python gone.py | tee log", "A=1 python gone.py"),
        *("bash -c 'python gone.py'", "bash -lc './gone.sh'", "mpirun -wdir /x python gone.py", "python ../gone.py"),
        *("torchrun --no-python gone.py", "python train.py --out gone.py", "bash -o pipefail go.sh gone.sh"),
        *("uv --directory x run python gone.py", "make train", "python plain", "python -um net.train"),
    ],
)
def test_what_may_be_there_on_the_machine_is_not_refused(code: Path, run: str) -> None:
    Path("job.yaml").write_text(f"name: a\nrun: {json.dumps(run)}\nbudget: 1 USD\n")
    assert read_job(Path("job.yaml")).run == run


@pytest.mark.parametrize(
    "setup",
    [
        *("make", "git clone --depth 1 https://a.example/net old", "curl -LO https://a.example/gone.sh", "bash get.sh"),
        *("pip install numpy && curl -o gone.py https://a.example/x", "wget https://a.example/gone.py", "mkdir -p x"),
        *("echo 'print(1)' > gone.py", "cat <<END > gone.py\nEND", "pip install -t . gone", "pip download gone"),
        *("apt-get download gone", "conda create -p env python", "python -m venv .venv", "uv venv", "pip install -e ."),
    ],
)
def test_what_a_setup_may_make_is_not_refused(code: Path, setup: str) -> None:
    for run in ("gone.py", "python gone.py", "./gone.sh", "./go.sh", "old/train.py", ".venv/bin/gone"):
        Path("job.yaml").write_text(f"name: a\nrun: {run}\nbudget: 1 USD\nsetup: {json.dumps(setup)}\n")
        assert read_job(Path("job.yaml")).run == run


@pytest.mark.parametrize(
    "setup",
    [
        *("uv pip install numpy", "pip install -q 'torch>2' -r requirements.txt >/dev/null 2>&1", "conda install x"),
        *("set -e\nsudo apt-get -y update && sudo apt-get install -y libgl1 # gone.py", "export A=1; pip install a"),
    ],
)
def test_a_setup_that_installs_alone_makes_no_script(code: Path, setup: str) -> None:
    for run in ("gone.py", "python gone.py", "./gone.sh", "./go.sh", "old/train.py"):
        assert problems(f"name: a\nrun: {run}\nbudget: 1 USD\nsetup: {json.dumps(setup)}\n".encode())


def test_a_bare_script_may_be_of_an_image_or_of_the_users_own_machines(code: Path) -> None:
    for more in ("image: a/b:1", "cloud: ssh\nssh: {hosts: [me@gpu1]}"):
        Path("job.yaml").write_text(f"name: a\nrun: gone.sh\nbudget: 1 USD\n{more}\n")
        assert read_job(Path("job.yaml")).run == "gone.sh"


class Inner(BaseModel):
    one: int = 1


class Outer(BaseModel):
    plain: Inner
    perhaps: Inner | None = None
    listed: tuple[Annotated[Inner, "each"], ...] = Field(default=(), alias="list")
    number: int = 2


def test_a_section_is_declared_once_and_a_key_that_is_none_of_its_is_told_there():
    assert list(sections(Outer)) == [((), Outer), (("plain",), Inner), (("perhaps",), Inner), (("list",), Inner)]
