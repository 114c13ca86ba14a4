from __future__ import annotations

from decimal import Decimal

import pytest

from gpucloud.domain.job.spec import Job
from gpucloud.domain.node.layer import (
    LayerWanted,
    is_needed,
    layer_key,
    nested_files,
    requirement_files,
    setup_digest,
    setup_files,
    setup_uses_tree,
    setup_variables,
    suffices,
)
from gpucloud.usecases.supervise.needs import wanted_for


@pytest.mark.parametrize(
    ("setup", "files"),
    [
        ("pip install torch", ()),
        ("pip install -r requirements.txt", ("requirements.txt",)),
        ("pip install -r a/dev.txt -c 'b.lock' && cat a/dev.txt", ("a/dev.txt", "b.lock")),
        ("pip install -rdev.txt --constraint=pins.txt -r names", ("dev.txt", "pins.txt", "names")),
        ("uv pip sync locked", ("locked",)),
        ("pip install -r https://a.example/requirements -r /etc/names", ()),
    ],
)
def test_the_files_that_a_setup_names_are_found(setup, files):
    assert setup_files(setup) == files


@pytest.mark.parametrize(
    ("setup", "uses"),
    [
        ("pip install -r requirements.txt", False),
        ("pip install -e .", True),
        ("pip install '.[dev]'", True),
        ("./install.sh", True),
        ("bash scripts/install.sh", True),
        ("python setup.py develop", True),
        ("pip install libs/mine/ && echo done", True),
        ("pip install ../mine", True),
        ("make deps", True),
        ("pip install --index-url https://a.example/simple/ torch", False),
        ("pip install make-it", False),
        ("echo 'open", True),
        ("uv sync", True),
        ("poetry install --no-root", True),
        ("make install", True),
        ("bash install.sh", True),
        ("pip install --editable=.", True),
        ("pip install -e.", True),
        ("pip install -e libs", True),
        ("pip install -e git+https://a.example/x.git", False),
        ("pip install --find-links wheels mine", True),
        ("pip install --find-links=https://a.example/wheels mine", False),
        ("pip install dist/mine-1.0-py3-none-any.whl", True),
        ("pip install mine.whl", True),
        ("pip install 'mine @ file:libs/mine'", True),
        ("pip install 'mine @ git+https://a.example/x.git@v1'", False),
        ("pip install $WHAT", True),
        ("pip install torch==$VERSION", False),
        ("python -m pip install -q -U numpy; uv pip install 'a[b]>=1'", False),
        ("sudo apt-get install -y libgl1 && pip install -r requirements.txt # don't ask", False),
        ("apt-get install -y ./mine.deb", True),
        ("pip install a # names only\nmake", True),
        ("pip install a \\\n  b >/dev/null 2>&1 || true", False),
        ("CMAKE_ARGS='-DX=on' pip install --no-binary :all: llama", False),
        ("cd libs && pip install .", True),
        ('pip install "$(python names.py)"', True),
        ("pip install $(cat names.txt)", True),
        ("python -m spacy download en_core_web_sm", False),
        ("python -c 'import mine'", True),
        ("sh <<END\nmake\nEND", True),
        ("pip", True),
        ("", False),
    ],
)
def test_a_setup_that_installs_from_the_tree_is_told_apart(setup, uses):
    assert setup_uses_tree(setup) is uses


@pytest.mark.parametrize(
    ("name", "text", "files"),
    [
        ("requirements.txt", "torch\n-r base.txt\n  --constraint=c/pins.txt # why\n", ("base.txt", "c/pins.txt")),
        ("req/dev.txt", "-r base.txt\n-rmore.txt\n-c ../pins.txt\n--requirement x.in", (
            "req/base.txt", "req/more.txt", "pins.txt", "req/x.in")),
        ("requirements.txt", "--extra-index-url x\n#-r no.txt\n-r https://a.example/r.txt\n-r /etc/hosts\n", ()),
        ("requirements.txt", "-r ../up.txt", ()),
        ("env.yml", "  - pip:\n      - -r r.txt\n      - '-c pins.txt'\n", ("r.txt", "pins.txt")),
    ],
)  # fmt: skip
def test_the_files_that_a_requirements_file_names_are_found(name, text, files):
    assert nested_files(name, text) == files


@pytest.mark.parametrize(
    "line",
    ["-e .", "--editable=./lib", ".", ".[dev]", "./libs/mine", "../mine", "  -e libs/mine", "libs/mine", "mine.whl",
     "--find-links wheels", "mine @ file:libs/mine", "-e."],
)  # fmt: skip
def test_a_requirements_file_may_install_from_the_tree(line):
    files = (("r.txt", f"numpy\n{line}\n".encode()),)
    assert setup_digest("pip install -r r.txt", files, "/1") != setup_digest("pip install -r r.txt", files, "/2")


@pytest.mark.parametrize(
    ("setup", "again"),
    [
        ("git clone --depth 1 https://a.example/net", True),
        ("git clone https://a.example/net /opt/net", False),
        ("pip install a && curl -LO https://a.example/run.sh", True),
        ("curl -so run.sh https://a.example/x; mkdir -p out", True),
        ("curl -s https://a.example/up", False),
        ("wget https://a.example/run.sh", True),
        ("wget -O /tmp/x https://a.example/x", False),
        ("mkdir -p /opt/x", False),
        ("pip install a", False),
        ("pip install a && curl -s https://a.example/x > input.txt", True),
        ("echo 1 >>state.txt", True),
        ("curl -s https://a.example/x >'a b' 2>/dev/null", True),
        ("echo 1 > ~/x; echo 2 >>$HOME/y", False),
        ("apt-get install -y libgl1 > apt.log 2>&1", False),
        ("conda list --explicit > spec.txt", True),
        ("date > /tmp/when 2>&1; echo 2>&1", False),
        ("> made", True),
        ("pip install a > pip.log 2>&1", False),
        ("pip install numpy>=1.26", False),
        ("pip install a >/dev/null 2>&1", False),
        ("cat < names >> /tmp/names", False),
        ("pip install -t vendor x", True),
        ("python -m pip install x --target=vendor", True),
        ("uv pip install --target vendor x", True),
        ("pip install --target /opt/vendor x", False),
        ("pip install --target=/opt/vendor x", False),
        ("pip install --timeout 3 -q x", False),
        ("conda env update -f env.yml", False),
        ("conda env update -f envs/gpu.yml --prune", False),
        ("mamba env update --file ./env.yml", False),
        ("conda env update -p ./env -f env.yml", True),
        ("conda env export > env.yml", True),
        ("test -f ./made || echo >/tmp/x", True),
        ("conda env update --file=envs/gpu.yml", False),
        ("conda env update -f envs/${GPU}.yml", True),
        ("conda env update --file $ENVFILE", True),
        ("mamba env update --file=$ENVFILE", True),
        ("conda install -y --file envs/packages.list", True),
        ("micromamba install -f ./specs/linux-64", True),
        ("apt-get install -y -f ./pkg.deb", True),
        ("mkdir -p data ~/logs", True),
        ("git clone ~/repos/net", True),
        ("git clone $HOME/repos/net", True),
        ("curl -O --netrc-file ~/.netrc https://a.example/x", True),
        ("wget -i ~/urls.txt", True),
        ("bash ~/install.sh", True),  # which may do anything where it runs
    ],
)
def test_a_setup_that_leaves_files_beside_the_script_runs_for_each_tree(setup, again):
    assert (setup_digest(setup, (), "/code/1") != setup_digest(setup, (), "/code/2")) is again


def test_what_a_requirements_file_installs_from_elsewhere_is_not_of_the_tree():
    data = b"-e git+https://a.example/x.git\n--editable=git+ssh://a.example/y\n.hidden\n...\n"
    data += b"--find-links https://a.example/w\na==1 ; python_version < '4' # see libs/x\n/mnt/wheels/b.whl\n"
    files = (("r.txt", data),)
    assert setup_digest("pip install -r r.txt", files, "/1") == setup_digest("pip install -r r.txt", files, "/2")


def test_a_layer_depends_on_text_files_and_interpreter_and_on_the_tree_only_if_used():
    plain = setup_digest("pip install a", (), "/code/1")
    assert setup_digest("pip install a", (), "/code/2") == plain
    assert setup_digest("pip install b", (), "/code/1") != plain
    assert setup_digest("pip install a", (("r.txt", b"x"),), "/code/1") != plain
    assert setup_digest("pip install .", (), "/code/1") != setup_digest("pip install .", (), "/code/2")
    assert setup_digest("pip install a", (), "/code/1", requirements=("boto3",)) != plain
    assert setup_digest("pip install a", (), "/code/1", conda=b"name: x") != plain
    assert setup_digest("", (), "", conda=b"name: x") != setup_digest("", (), "", conda=b"name: y")


RATE, BUILD, NAMED = ("LR", "0.1"), ("CMAKE_ARGS", "-DCUDA=on"), ("VERSION", "2.5")


@pytest.mark.parametrize(
    ("setup", "counted"),
    [
        ("pip install torch", (BUILD,)),
        ("pip install torch==$VERSION", (BUILD, NAMED)),
        ("pip install torch==${VERSION}", (BUILD, NAMED)),
        ("bash install.sh", (RATE, BUILD, NAMED)),
    ],
)
def test_the_jobs_variables_count_for_a_layer_as_far_as_its_making_may_read_them(setup, counted):
    assert setup_variables(setup, (RATE, BUILD, NAMED)) == counted
    assert setup_digest(setup, (), "", env=(BUILD,)) != setup_digest(setup, (), "", env=())


def test_a_layers_name_depends_on_interpreter_platform_and_kind_of_gpu():
    one = {"python": "/p", "version": (3, 11, 7), "platform": "linux-x86_64", "gpu": ("auto", "580.95.05")}
    others = ({"python": "/q"}, {"version": (3, 12, 0)}, {"platform": "linux-aarch64"}, {"gpu": ("cu126", "580.95.05")})
    keys = {layer_key("d", **one), layer_key("e", **one), *(layer_key("d", **{**one, **other}) for other in others)}
    assert len(keys) == 6
    assert layer_key("d", **one) == layer_key("d", **one)


@pytest.mark.parametrize(
    ("always", "boto3", "torch", "base", "needed"),
    [
        (True, False, False, {"boto3": "1.44", "torch": "2.13"}, True),
        (False, True, True, {"boto3": "1.44", "torch": "2.13"}, False),
        (False, True, False, {"boto3": "1.35.1", "torch": None}, True),
        (False, False, True, {"boto3": None, "torch": None}, True),
        (False, False, False, {"boto3": None, "torch": None}, False),
    ],
)
def test_a_layer_is_made_for_a_setup_or_for_what_the_base_lacks(always, boto3, torch, base, needed):
    assert is_needed(LayerWanted(digest="d", always=always, boto3=boto3, torch=torch), **base) is needed


@pytest.mark.parametrize("choices", [{"setup": "pip install -r r.txt"}, {"conda": "env.yml"}])
def test_what_a_requirements_file_names_in_its_turn_makes_another_layer_and_may_bring_torch(tmp_path, choices):
    job = Job(name="j", run="train.py", budget_usd=Decimal(1), source=tmp_path / "j.yaml", code=tmp_path, **choices)

    def wanted():
        return wanted_for(job, package="", code="/code", secrets={}, store_url="file:///s", power_off=())

    (tmp_path / "env.yml").write_text("dependencies:\n- python\n- pip:\n  - -r r.txt\n")
    (tmp_path / "r.txt").write_text("-r base.txt\n")
    (tmp_path / "base.txt").write_text("-r r.txt\nnumpy==1\n")  # a circle
    before = wanted()
    (tmp_path / "base.txt").write_text("-r r.txt\nnumpy==2\n")
    assert wanted().setup_digest != before.setup_digest
    assert before.torch
    (tmp_path / "base.txt").write_text("torch==2.5\n")
    assert not wanted().torch


def test_the_trees_own_requirements_count_where_it_is_installed():
    assert requirement_files("pip install -r r.txt") == ("r.txt",)
    assert requirement_files("pip install -e .") == ("pyproject.toml", "setup.cfg", "setup.py")


@pytest.mark.parametrize(
    ("version", "enough"),
    [
        ("1.36.0", True),
        ("1.44.5", True),
        ("2.0", True),
        ("1.35.99", False),
        ("1.9", False),
        ("new", False),
        (None, False),
    ],
)
def test_boto3_suffices_from_conditional_writes_on(version, enough):
    assert suffices(version) is enough
