"""The stand-in nvidia-smi answers as the genuine one would, in the forms that are asked for."""

from __future__ import annotations

import subprocess
from pathlib import Path

from gpucloud.system import smi
from tests.standins.gpus import uuid, write_nvidia_smi


def test_its_xml_names_the_model_and_every_device(tmp_path: Path) -> None:
    write_nvidia_smi(tmp_path, name="Tesla T4", count=2, memory_mib=15360)
    text = subprocess.run([tmp_path / "nvidia-smi", "-q", "-x"], capture_output=True, text=True, check=True).stdout
    assert [(gpu.index, gpu.name, gpu.memory_mib, gpu.uuid) for gpu in smi.parse(text)] == [
        (0, "Tesla T4", 15360, uuid(0)),
        (1, "Tesla T4", 15360, uuid(1)),
    ]


def test_it_answers_queries_field_by_field(tmp_path: Path) -> None:
    write_nvidia_smi(tmp_path, name="NVIDIA A10G", count=1, memory_mib=23028)
    argv = [tmp_path / "nvidia-smi", "--query-gpu=index,memory.total,nonsense", "--format=csv,noheader,nounits"]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "0, 23028, [N/A]\n"
