"""The next step for a machine, as data: what it says of itself in, commands out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpucloud.domain.node.hardware import Gpu, GpuProcess
from gpucloud.domain.node.machine.decide import next_step
from gpucloud.domain.node.machine.facts import (
    AptAnswer,
    Ask,
    MachineFacts,
    MachineStep,
    MachineWanted,
    MigInstance,
    MigRoom,
    Package,
    PciDevice,
    Ready,
    Reboot,
    Source,
    Stuck,
)

APT = (
    "env DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=a apt-get -q -y "
    "-o DPkg::Lock::Timeout=600 -o Acquire::Retries=3 "
    "-o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold"
)
INSTALL = f"{APT} install --no-install-recommends"
REPLACE = f"{INSTALL} --allow-change-held-packages --allow-downgrades"

A10G = PciDevice(vendor=0x10DE, device=0x2237, kind=0x0302)
H100 = PciDevice(vendor=0x10DE, device=0x2330, kind=0x0302)
V100 = PciDevice(vendor=0x10DE, device=0x1DB1, kind=0x0302)
NVSWITCH = PciDevice(vendor=0x10DE, device=0x22A3, kind=0x0680)
EFA = PciDevice(vendor=0x1D0F, device=0xEFA2, kind=0x0200)

RENTED = MachineWanted(install=True, branch="", least_driver="580.65.06", gpus=1)
OWN = MachineWanted(install=False, branch="", least_driver="450.80.02", gpus=1)

ARCHIVE = Source(
    path="/etc/apt/sources.list.d/ubuntu.sources",
    text="Types: deb\nURIs: http://us-west-2.ec2.archive.ubuntu.com/ubuntu/\nSuites: noble\nComponents: main\n",
)
CUDA = Source(
    path="/etc/apt/sources.list.d/cuda-ubuntu2404-x86_64.list",
    text="deb https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/x86_64/ /\n",
)

HERE = (
    "linux-modules-nvidia-580-server-open-6.8.0-1055-aws",
    "nvidia-headless-no-dkms-580-server-open",
    "nvidia-utils-580-server",
)
SERIES = ("linux-modules-nvidia-580-server-open-aws-6.8", *HERE[1:])
JAMMY_HWE = ("linux-modules-nvidia-580-server-open-aws-hwe-22.04", *HERE[1:])
HWE = ("linux-modules-nvidia-580-server-open-aws-hwe-24.04", *HERE[1:])
FLAVOUR = ("linux-modules-nvidia-580-server-open-aws", *HERE[1:])
COMPILED = ("linux-headers-6.8.0-1055-aws", "nvidia-dkms-580-server-open", *HERE[1:])
FROM_UBUNTU = (HERE, SERIES, HWE, FLAVOUR, COMPILED)


PREBUILT = "linux-modules-nvidia-580-server-open"
JAMMY = (
    (f"{PREBUILT}-6.8.0-48-generic", *HERE[1:]),
    (f"{PREBUILT}-generic-6.8", *HERE[1:]),
    (f"{PREBUILT}-generic-hwe-22.04", *HERE[1:]),
    (f"{PREBUILT}-generic", *HERE[1:]),
    ("linux-headers-6.8.0-48-generic", "nvidia-dkms-580-server-open", *HERE[1:]),
)
SUBNET = ("nvlsm", "infiniband-diags")
UTILS = (("nvidia-utils-580-server", "580.178.04-0ubuntu0.22.04.1"),)
CUT = (MigInstance(gpu=0, profile="1g.5gb", number=13), MigInstance(gpu=0, profile="1g.5gb", number=11))


def bare(**changes) -> MachineFacts:
    """A stock Ubuntu 24.04 on a machine with one A10G, as a cloud starts it."""
    facts = MachineFacts(
        os="ubuntu", release="24.04", codename="noble", arch="x86_64", kernel="6.8.0-1055-aws", privilege="sudo",
        systemd=True, free_bytes=90 << 30, sources=(ARCHIVE,), sources_digest="s1", listed="s1", pci=(A10G,),
    )  # fmt: skip
    return replace(facts, **changes)


def working(driver="595.91.07", **changes) -> MachineFacts:
    """The same machine with a driver that answers."""
    module = (("6.8.0-1055-aws", driver),)
    facts = bare(gpus=(gpu(driver),), loaded=driver, modules=module, packages=())
    return replace(facts, **changes)


def gpu(driver, **changes) -> Gpu:
    found = Gpu(index=0, uuid="GPU-1", name="A10G", memory_mib=23028, driver=driver, persistence=True)
    return replace(found, **changes)


def yes(packages, *installs) -> AptAnswer:
    utils = ("nvidia-utils-580-server", "580.178.04-0ubuntu0.24.04.1")
    return AptAnswer(packages=packages, installs=installs or (utils,))


def no(packages, said="E: Unable to correct problems, you have held broken packages.") -> AptAnswer:
    return AptAnswer(packages=packages, installs=None, said=said)


def commands(decision) -> tuple[str, ...]:
    assert isinstance(decision, MachineStep), decision
    return tuple(" ".join(run.argv) for run in decision.commands)


LOAD = ("modprobe -r nouveau", "modprobe nvidia", "modprobe nvidia_uvm")
RELOAD = ("modprobe -r nvidia_uvm nvidia_drm nvidia_modeset nvidia", "modprobe nvidia", "modprobe nvidia_uvm")

STATES = {
    "a bare machine whose lists are old reads them": (
        bare(listed=""), RENTED, "lists", (f"{APT} update",),
    ),
    "a bare 24.04 gets the signed modules of the running kernel": (
        bare(asked=tuple(map(yes, FROM_UBUNTU))), RENTED, "driver", (f"{REPLACE} {' '.join(HERE)}",),
    ),
    "a bare 22.04 whose kernel is no longer built for gets the newest kernel of its series": (
        bare(release="22.04", asked=(no(HERE), *map(yes, FROM_UBUNTU[1:]), yes(JAMMY_HWE))), RENTED,
        "driver", (f"{REPLACE} {' '.join(SERIES)}",),
    ),
    "without prebuilt modules they are compiled": (
        bare(asked=(no(HERE), no(SERIES), no(HWE), no(FLAVOUR), yes(COMPILED))), RENTED,
        "driver", (f"{REPLACE} {' '.join(COMPILED)}",),
    ),
    "a named branch is the one that is installed": (
        bare(asked=tuple(yes(tuple(n.replace("580", "570") for n in names)) for names in FROM_UBUNTU)),
        replace(RENTED, branch="570", least_driver=""),
        "driver", (f"{REPLACE} {' '.join(HERE)}".replace("580", "570"),),
    ),
    "a driver that is too old is replaced, held or not": (
        working("535.183.01", packages=(Package(name="nvidia-utils-535-server", version="535.183.01-0", held=True),),
                asked=tuple(map(yes, FROM_UBUNTU))),
        RENTED, "driver", (f"{REPLACE} {' '.join(HERE)}",),
    ),
    "a driver of another branch than the one named is replaced": (
        working(asked=tuple(map(yes, FROM_UBUNTU))), replace(RENTED, branch="580", least_driver=""),
        "driver", (f"{REPLACE} {' '.join(HERE)}",),
    ),
    "a driver from a .run installer is removed by its own tool first": (
        working("535.183.01", runfile=True), RENTED, "runfile", ("nvidia-uninstall --silent",),
    ),
    "a Volta GPU gets the closed modules": (
        bare(pci=(V100,), asked=tuple(yes(tuple(n.replace("-open", "") for n in names)) for names in FROM_UBUNTU)),
        RENTED, "driver", (f"{REPLACE} {' '.join(HERE)}".replace("-open", ""),),
    ),
    "what is installed is loaded before anything else": (
        bare(gpus=(), gpu_fault="exit code 9: NVIDIA-SMI has failed", modules=(("6.8.0-1055-aws", "580.178.04"),)),
        RENTED, "module", LOAD,
    ),
    "a module of another version than the disk's is taken out and loaded anew": (
        bare(gpus=(), gpu_fault="exit code 18: Driver/library version mismatch", loaded="580.159.03",
             modules=(("6.8.0-1055-aws", "580.178.04"),)),
        RENTED, "reload", RELOAD,
    ),
    "dpkg that was killed is repaired first": (
        bare(dpkg_interrupted=True, packages=(Package(name="nvidia-utils-580-server", version="1", state="unpacked"),)),
        RENTED, "dpkg",
        ("env DEBIAN_FRONTEND=noninteractive dpkg --force-confdef --force-confold --configure -a", f"{APT} -f install"),
    ),
    "cloud-init is waited for": (
        bare(cloud_init_runs=True), RENTED, "cloud-init", ("cloud-init status --wait",),
    ),
    "what we installed is held, with its kernel": (
        working("580.178.04", installed_by_us=True, packages=(
            Package(name="nvidia-utils-580-server", version="580.178.04-0ubuntu0.24.04.1"),
            Package(name="linux-image-6.8.0-1055-aws", version="6.8.0-1055.58"),
            Package(name="linux-aws", version="6.8.0-1055.58", held=True),
            Package(name="docker.io", version="28.2.2"),
        )),
        RENTED, "hold", ("apt-mark hold nvidia-utils-580-server linux-image-6.8.0-1055-aws",),
    ),
    "the driver is kept loaded between jobs": (
        working(gpus=(gpu("595.91.07", persistence=False),)), RENTED,
        "persistence", ("systemctl start nvidia-persistenced", "nvidia-smi -pm 1"),
    ),
    "a fabric manager that does not run is started": (
        working("580.178.04", pci=(H100, NVSWITCH), fabric_manager="580.178.04"), RENTED, "fabric-service",
        ("systemctl enable nvidia-fabricmanager", "systemctl restart nvidia-fabricmanager"),
    ),
    "a fabric manager of another version than the driver is replaced by exactly that one": (
        working("580.178.04", pci=(H100, NVSWITCH), fabric_manager="580.159.04", fabric_manager_active=True,
                asked=(yes(("nvidia-fabricmanager-580=580.178.04*", "libnvidia-nscq-580=580.178.04*")),
                       no(("nvidia-fabricmanager=580.178.04*", "libnvidia-nscq=580.178.04*")),
                       no(("nvidia-fabricmanager-580=580.178.04*",)), no(("nvidia-fabricmanager=580.178.04*",)))),
        RENTED, "fabric-manager",
        (f"{REPLACE} nvidia-fabricmanager-580=580.178.04* libnvidia-nscq-580=580.178.04*",
         "systemctl enable nvidia-fabricmanager", "systemctl restart nvidia-fabricmanager"),
    ),
    "a B200's NVLink needs its subnet manager too, and packages have no branch in their names": (
        working("595.91.07", bridges=4,
                asked=(no(("nvidia-fabricmanager-595=595.91.07*", "libnvidia-nscq-595=595.91.07*", "nvlsm",
                           "infiniband-diags")),
                       yes(("nvidia-fabricmanager=595.91.07*", "libnvidia-nscq=595.91.07*", "nvlsm",
                            "infiniband-diags")),
                       no(("nvidia-fabricmanager-595=595.91.07*", "nvlsm", "infiniband-diags")),
                       no(("nvidia-fabricmanager=595.91.07*", "nvlsm", "infiniband-diags")))),
        RENTED, "fabric-manager",
        (f"{REPLACE} nvidia-fabricmanager=595.91.07* libnvidia-nscq=595.91.07* nvlsm infiniband-diags",
         "systemctl enable nvidia-fabricmanager", "systemctl restart nvidia-fabricmanager"),
    ),
    "a B200's subnet manager comes beside a fabric manager of the right version": (
        working("580.178.04", bridges=4, fabric_manager="580.178.04", fabric_manager_active=True,
                asked=(yes(("nvidia-fabricmanager-580=580.178.04*", "libnvidia-nscq-580=580.178.04*", *SUBNET)),
                       no(("nvidia-fabricmanager=580.178.04*", "libnvidia-nscq=580.178.04*", *SUBNET)),
                       no(("nvidia-fabricmanager-580=580.178.04*", *SUBNET)),
                       no(("nvidia-fabricmanager=580.178.04*", *SUBNET)))),
        RENTED, "fabric-manager",
        (f"{REPLACE} nvidia-fabricmanager-580=580.178.04* libnvidia-nscq-580=580.178.04* nvlsm infiniband-diags",
         "systemctl enable nvidia-fabricmanager", "systemctl restart nvidia-fabricmanager"),
    ),
    "parts of another MIG profile, which nobody uses, make way": (
        working(gpus=(gpu("595.91.07", mig=True),), mig=(MigRoom(gpu=0, profile="3g.20gb", free=0, total=2),),
                mig_instances=CUT),
        replace(RENTED, mig="3g.20gb"), "mig-clear",
        ("nvidia-smi mig -dci -i 0 -gi 13", "nvidia-smi mig -dgi -i 0 -gi 13",
         "nvidia-smi mig -dci -i 0 -gi 11", "nvidia-smi mig -dgi -i 0 -gi 11"),
    ),
    "an older kernel's modules are left, and they are compiled for the one that runs": (
        bare(kernel="6.8.0-48-generic", release="22.04", asked=(
            *(no(names) for names in JAMMY[:3]),
            yes(JAMMY[3], *UTILS, ("linux-modules-nvidia-580-server-open-5.15.0-130-generic", "5.15.0-130.140"),
                ("linux-image-5.15.0-130-generic", "5.15.0-130.140")),
            yes(JAMMY[4]))),
        RENTED, "driver", (f"{REPLACE} {' '.join(JAMMY[4])}",),
    ),
    "modules for an older kernel than the running one need no reboot, but others": (
        bare(modules=(("6.5.0-1020-aws", "580.178.04"),), asked=tuple(map(yes, FROM_UBUNTU))), RENTED,
        "driver", (f"{REPLACE} {' '.join(HERE)}",),
    ),
    "the login that starts the job's containers may use Docker": (
        working(docker="28.2.2", docker_answers=True, docker_has_nvidia=True, docker_needs_root=True, toolkit="1.20.1",
                login="ubuntu"),
        replace(RENTED, runtime="docker"), "docker-group", ("usermod -aG docker ubuntu",),
    ),
    "MIG is switched on, after what holds the GPUs is stopped": (
        working(), replace(RENTED, mig="3g.71gb"), "mig-mode",
        ("systemctl stop nvidia-dcgm dcgm-exporter nvidia-persistenced", "nvidia-smi -i 0 -mig 1"),
    ),
    "a GPU is divided into as many MIG devices as fit": (
        working(gpus=(gpu("595.91.07", mig=True),), mig=(MigRoom(gpu=0, profile="3g.71gb", free=2, total=2),)),
        replace(RENTED, mig="3g.71gb"), "mig", ("nvidia-smi mig -i 0 -cgi 3g.71gb,3g.71gb -C",),
    ),
    "MPS is started": (working(), replace(RENTED, mps=True), "mps", ("nvidia-cuda-mps-control -d",)),
    "EFA's software is checked against AWS's key before it is run": (
        working(pci=(A10G, EFA)), replace(RENTED, efa=True), "efa",
        ("gpgv --keyring {folder}/efa.gpg {folder}/efa.tar.gz.sig {folder}/efa.tar.gz",
         'sh -c cd "$1" && rm -rf aws-efa-installer && tar -xzf efa.tar.gz && cd aws-efa-installer && '
         "./efa_installer.sh -y -g sh {folder}"),
    ),
    "an image needs Docker": (working(), replace(RENTED, runtime="auto"), "docker", (f"{INSTALL} docker.io",)),
    "Docker needs NVIDIA's toolkit, all of it at one version": (
        working(docker="28.2.2", docker_answers=True,
                sources=(ARCHIVE, Source(path="/x.list", text="deb https://nvidia.github.io/libnvidia-container/ /"))),
        replace(RENTED, runtime="docker"), "toolkit",
        (f"{REPLACE} nvidia-container-toolkit=1.20.1-1 nvidia-container-toolkit-base=1.20.1-1 "
         "libnvidia-container-tools=1.20.1-1 libnvidia-container1=1.20.1-1",),
    ),
    "Docker is told of the toolkit": (
        working(docker="28.2.2", docker_answers=True, toolkit="1.20.1"), replace(RENTED, runtime="docker"),
        "docker-gpus", ("nvidia-ctk runtime configure --runtime=docker", "systemctl restart docker"),
    ),
    "the exporter is bound to the loopback": (
        working(docker="28.2.2", docker_answers=True, docker_has_nvidia=True, toolkit="1.20.1"),
        replace(RENTED, exporter=True), "exporter",
        ("docker rm -f gpucloud-dcgm-exporter",
         "docker run -d --name gpucloud-dcgm-exporter --restart unless-stopped --gpus all --cap-add SYS_ADMIN "
         "-p 127.0.0.1:9400:9400 nvcr.io/nvidia/k8s/dcgm-exporter:4.5.3-4.8.2-distroless"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("state", STATES)
def test_step(state):
    facts, wanted, name, expected = STATES[state]
    decision = next_step(facts, wanted)
    assert (getattr(decision, "name", decision), commands(decision)) == (name, expected)


READY = {
    "a Deep Learning AMI that has everything": (
        working(pci=(H100, NVSWITCH, EFA), fabric_manager="595.91.07", fabric_manager_active=True, efa="1.50.0",
                efa_answers=True, docker="29.1.2", docker_answers=True, docker_has_nvidia=True, toolkit="1.20.1"),
        replace(RENTED, efa=True, runtime="docker"),
    ),
    "a B200 whose fabric is complete, whatever brought its subnet manager": (
        working("580.178.04", gpus=(gpu("580.178.04", fabric="Completed"),), bridges=4, fabric_manager="580.178.04",
                fabric_manager_active=True), RENTED,
    ),
    "one's own host with any driver that works, and no right to change it": (working("470.256.02", privilege=""), OWN),
    "a machine without GPUs, for a job that did not ask for any": (bare(pci=()), replace(RENTED, asked=False)),
    "a GPU machine without a driver, for a job that wants none": (bare(), replace(RENTED, gpus=0)),
    "GPUs that this kernel shows no PCI bus of": (working(pci=()), RENTED),
}  # fmt: skip


@pytest.mark.parametrize("state", READY)
def test_nothing_is_done_to(state):
    assert isinstance(next_step(*READY[state]), Ready)


def test_the_versions_that_were_found_are_said():
    facts, wanted = READY["a Deep Learning AMI that has everything"]
    assert next_step(facts, wanted) == Ready(
        versions=(
            ("os", "ubuntu 24.04"),
            ("kernel", "6.8.0-1055-aws"),
            ("driver", "595.91.07"),
            ("fabric_manager", "595.91.07"),
            ("efa", "1.50.0"),
            ("docker", "29.1.2"),
            ("container_toolkit", "1.20.1"),
        )
    )


STUCK = {
    "no GPU on the bus": (bare(pci=()), RENTED, "no NVIDIA GPU on this machine's PCI bus"),
    "no right to change anything": (
        bare(privilege="", asked=tuple(map(yes, FROM_UBUNTU))), RENTED,
        "no NVIDIA driver: no `nvidia-smi`; changing that needs root, and `sudo -n` asks for a password",
    ),
    "Debian": (
        bare(os="debian", release="12"), RENTED,
        "no NVIDIA driver: no `nvidia-smi`; gpucloud installs them on Ubuntu 22.04 and 24.04, and this is debian 12",
    ),
    "Volta under a branch that dropped it": (
        bare(pci=(V100,)), replace(RENTED, branch="590"),
        "driver 590 does not know GPUs older than Turing (PCI device 10de:1db1); 580 is the last",
    ),
    "no room": (
        bare(free_bytes=1 << 30), RENTED,
        "no NVIDIA driver: no `nvidia-smi`; installing one needs 3 GiB, and 1.0 GiB are free on /",
    ),
    "rebooted once, and the module still does not load": (
        bare(gpus=(), gpu_fault="exit code 9: x", modules=(("6.8.0-1055-aws", "580.178.04"),), tried=("module",),
             rebooted_for="the driver's module does not load"),
        RENTED, "the driver's module does not load, even after a reboot",
    ),
    "rebooted once, and Secure Boot refuses the module": (
        bare(gpus=(), gpu_fault="exit code 9: x", modules=(("6.8.0-1055-aws", "580.178.04"),), tried=("module",),
             rebooted_for="the driver's module does not load", secure_boot=True),
        RENTED, "the driver's module does not load: Secure Boot is on, and the module may not be signed",
    ),
    "one's own host without a driver": (bare(), OWN, "no NVIDIA driver: no `nvidia-smi`"),
    "one's own host that needs a reboot": (
        bare(gpus=(), gpu_fault="x", loaded="580.1.1", modules=(("6.8.0-1055-aws", "580.178.04"),), tried=("reload",)),
        OWN, "a reboot is needed: driver 580.1.1 is loaded and 580.178.04 installed",
    ),
    "one's own host whose fabric manager does not run": (
        working("580.178.04", pci=(H100, NVSWITCH), fabric_manager="580.178.04"), OWN,
        "the fabric manager 580.178.04 does not run",
    ),
    "a MIG profile that the GPUs have not": (
        working(gpus=(gpu("595.91.07", mig=True),), mig=(MigRoom(gpu=0, profile="1g.18gb", free=7, total=7),)),
        replace(RENTED, mig="3g.71gb"), "these GPUs have no MIG profile 3g.71gb; they have 1g.18gb",
    ),
    "parts of another MIG profile that somebody uses": (
        working(gpus=(gpu("595.91.07", mig=True, processes=(GpuProcess(pid=7, name="python3"),)),),
                mig=(MigRoom(gpu=0, profile="3g.20gb", free=0, total=2),), mig_instances=CUT),
        replace(RENTED, mig="3g.20gb"),
        "3g.20gb is wanted, and MIG cuts GPU 0 into 1g.5gb + 1g.5gb, which somebody uses",
    ),
    "parts of another MIG profile on one's own host": (
        working(gpus=(gpu("595.91.07", mig=True),), mig=(MigRoom(gpu=0, profile="3g.20gb", free=0, total=2),),
                mig_instances=CUT),
        replace(OWN, mig="3g.20gb"), "3g.20gb is wanted, and MIG cuts GPU 0 into 1g.5gb + 1g.5gb",
    ),
    "a login that may not use Docker on one's own host": (
        working(docker="28.2.2", docker_answers=True, docker_has_nvidia=True, docker_needs_root=True, toolkit="1.20.1",
                login="me"),
        replace(OWN, runtime="docker"), "me may not use Docker",
    ),
    "no archive with that driver": (
        bare(sources=(ARCHIVE, CUDA),
             asked=(*map(no, FROM_UBUNTU), no(("nvidia-driver-pinning-580",)),
                    no(("linux-headers-6.8.0-1055-aws", "nvidia-open"), "E: Unable to locate package nvidia-open"))),
        RENTED,
        "no NVIDIA driver: no `nvidia-smi`, and neither Ubuntu's archive nor NVIDIA's has driver 580 for kernel "
        "6.8.0-1055-aws: E: Unable to locate package nvidia-open",
    ),
}  # fmt: skip


@pytest.mark.parametrize("state", STUCK)
def test_it_says_why_and_what_helps(state):
    facts, wanted, what = STUCK[state]
    decision = next_step(facts, wanted)
    assert isinstance(decision, Stuck), decision
    assert decision.what == what
    assert decision.hint


def test_on_ones_own_host_the_hint_is_the_command_and_the_key_that_lets_gpucloud_do_it():
    decision = next_step(bare(kernel="6.8.0-151-generic"), OWN)
    assert isinstance(decision, Stuck)
    assert decision.hint == (
        "sudo apt-get install linux-modules-nvidia-580-server-open-generic nvidia-headless-no-dkms-580-server-open "
        "nvidia-utils-580-server; or `machine: {driver: 580}`: gpucloud may install it"
    )


REBOOTS = {
    "modules for a kernel that came with them": (
        bare(modules=(("6.8.0-1070-aws", "580.178.04"),)), "the driver's modules are for kernel 6.8.0-1070-aws",
    ),
    "a module that does not load": (
        bare(gpus=(), gpu_fault="x", modules=(("6.8.0-1055-aws", "580.178.04"),), tried=("module",)),
        "the driver's module does not load",
    ),
    "a module in use that is not the installed one": (
        bare(gpus=(), gpu_fault="x", loaded="580.159.03", modules=(("6.8.0-1055-aws", "580.178.04"),),
             tried=("reload",)),
        "driver 580.159.03 is loaded and 580.178.04 installed",
    ),
    "a GPU that hangs": (
        bare(gpus=(), gpu_fault="no answer within 30 s", loaded="580.178.04",
             modules=(("6.8.0-1055-aws", "580.178.04"),)),
        "nvidia-smi failed: no answer within 30 s",
    ),
}  # fmt: skip


@pytest.mark.parametrize("state", REBOOTS)
def test_a_reboot_is_asked_for_by(state):
    facts, why = REBOOTS[state]
    assert next_step(facts, RENTED) == Reboot(why=why)


def test_apt_is_asked_about_every_way_at_once():
    assert next_step(bare(), RENTED) == Ask(sets=FROM_UBUNTU)


def test_an_earlier_nodes_version_is_asked_for_first_and_taken_from_nvidia_when_ubuntu_has_moved_on():
    wanted = replace(RENTED, version="580.159.04")
    pinned = tuple((*names[:-1], "nvidia-utils-580-server=580.159.04*") for names in FROM_UBUNTU)
    assert next_step(bare(), wanted) == Ask(sets=pinned + FROM_UBUNTU)
    assert commands(next_step(bare(asked=(*map(yes, pinned), *map(yes, FROM_UBUNTU))), wanted)) == (
        f"{REPLACE} {' '.join(pinned[0])}",
    )
    moved_on = bare(asked=(*map(no, pinned), *map(yes, FROM_UBUNTU)))
    assert next_step(moved_on, wanted).name == "nvidia-repository"
    known = replace(moved_on, sources=(ARCHIVE, CUDA))
    sets = (("nvidia-driver-pinning-580.159.04",), ("nvidia-driver-pinning-580",))
    assert next_step(known, wanted) == Ask(sets=sets)
    asked = (*known.asked, *map(yes, sets))
    assert commands(next_step(replace(known, asked=asked), wanted)) == (f"{INSTALL} nvidia-driver-pinning-580.159.04",)
    # Nothing can be had of that version: what the archive has is better than nothing.
    gone = (*known.asked, *map(no, sets), no(("linux-headers-6.8.0-1055-aws", "nvidia-open")))
    assert commands(next_step(replace(known, asked=gone), wanted)) == (f"{REPLACE} {' '.join(HERE)}",)


def test_an_nvswitch_machine_takes_no_driver_without_a_fabric_manager_of_its_version():
    sets = tuple((*names, "nvidia-fabricmanager-580") for names in FROM_UBUNTU)
    other = (("nvidia-utils-580-server", "580.178.04-0ubuntu1"), ("nvidia-fabricmanager-580", "580.159.04-1"))
    facts = bare(pci=(H100, NVSWITCH), asked=tuple(yes(names, *other) for names in sets))
    assert next_step(facts, RENTED).name == "nvidia-repository"
    same = (other[0], ("nvidia-fabricmanager-580", "580.178.04-1"))
    facts = replace(facts, asked=tuple(yes(names, *same) for names in sets))
    assert commands(next_step(facts, RENTED)) == (f"{REPLACE} {' '.join(sets[0])}",)


def test_nvidias_repository_is_added_with_its_key_pinned_and_its_source_last():
    step = next_step(bare(asked=tuple(map(no, FROM_UBUNTU))), RENTED)
    place = "https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/x86_64"
    assert [(d.url, d.fingerprint) for d in step.downloads] == [
        (f"{place}/3bf863cc.pub", "EB693B3035CD5710E231E123A4B469963BF863CC")
    ]
    assert commands(step)[0] == (
        "install -D -m 644 {folder}/nvidia-repository.gpg /usr/share/keyrings/cuda-archive-keyring.gpg"
    )
    assert step.commands[-1].argv[-1] == "/etc/apt/sources.list.d/cuda-ubuntu2404-x86_64.list"
    assert step.commands[-1].text == f"deb [signed-by=/usr/share/keyrings/cuda-archive-keyring.gpg] {place}/ /\n"


def test_a_mirror_takes_the_archives_place_in_both_kinds_of_source_files_and_nothing_elses():
    old = Source(
        path="/etc/apt/sources.list",
        text="deb http://archive.ubuntu.com/ubuntu noble main\n"
        "deb http://security.ubuntu.com/ubuntu noble-security main\n",
    )
    wanted = replace(RENTED, apt_mirror="https://mirror.example.com/ubuntu")
    step = next_step(bare(sources=(old, ARCHIVE, CUDA)), wanted)
    assert [(run.argv[-1], run.text) for run in step.commands] == [
        ("/etc/apt/sources.list",
         "deb https://mirror.example.com/ubuntu noble main\n"
         "deb https://mirror.example.com/ubuntu noble-security main\n"),
        ("/etc/apt/sources.list.d/ubuntu.sources",
         "Types: deb\nURIs: https://mirror.example.com/ubuntu\nSuites: noble\nComponents: main\n"),
    ]  # fmt: skip
