"""The kinds of values that job-file keys take, for pydantic to read and for JSON Schema to describe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, GetCoreSchemaHandler, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema, core_schema

from gpucloud.adapters.jobfile import values
from gpucloud.domain.job.spec import Access as AccessName
from gpucloud.domain.job.spec import Cloud as CloudName
from gpucloud.domain.job.spec import (
    ContainerRuntime,
    GatePolicy,
    Launcher,
    Layout,
    OnNotice,
    Optimizer,
    Precision,
    Strategy,
)
from gpucloud.domain.job.spec import MarketPolicy as MarketName
from gpucloud.domain.job.spec import Policy as PolicyName
from gpucloud.domain.node.gate.models import MODELS
from gpucloud.domain.node.numbers import compiled
from gpucloud.domain.node.status import LONGEST_NAME

Schema = dict[str, Any]
listed = values.listed


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Reads a value with `parse` and with nothing else, so that every message is ours."""

    parse: Callable[[object], object]
    schema: Schema

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return pydantic's form of `parse`."""
        del source, handler
        return core_schema.no_info_plain_validator_function(self.parse)

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        """Return the JSON Schema."""
        del core, handler
        return dict(self.schema)


def _string(pattern: str | None = None, *examples: str) -> Schema:
    shape: Schema = {"pattern": f"^({pattern})$"} if pattern else {"minLength": 1}
    return {"type": "string", **shape, **({"examples": list(examples)} if examples else {})}


def _whole(low: int, high: int) -> Read:
    return Read(values.whole(low, high), {"type": "integer", "minimum": low, "maximum": high})


def _list_of(item: Schema) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [item, {"type": "array", "items": item, "uniqueItems": True}]})


def _mapping_of(key: str, value: Schema) -> WithJsonSchema:
    return WithJsonSchema({"type": "object", "propertyNames": {"pattern": f"^({key})$"}, "additionalProperties": value})


_LINE = r"[^\n]+"
_METRIC = rf"[A-Za-z_][\w.-]{{0,{LONGEST_NAME - 1}}}"
_SPAN = r"\s*([0-9.]+\s*[A-Za-z]+\s*)+"
_USD = r"\s*(\$ ?[0-9.]+|[0-9.]+ ?[Uu][Ss][Dd])\s*"
_COUNT = r"\s*[0-9.]+(e[0-9]+| ?[KkMBT])?\s*"
_SCALAR: Schema = {"type": ["string", "number"]}
_OUTPUT = _string(r"[^/~\n][^\n]*")


def _gpu(value: object) -> str:
    """Return a GPU's name as clouds write it, in whatever case it was written."""
    written = values.matching(values.GPU, "the name of a GPU, such as A100")(value)
    return next((model for model in MODELS if model.lower() == written.lower()), written)


_GPU = Read(_gpu, _string(values.GPU))
_REGION = Read(values.matching(values.REGION, "a region, such as us-west-2"), _string(values.REGION))
_SECRET = Read(values.matching(values.SECRET, "the name of a secret: A–Z, 0–9 and _"), _string(values.SECRET))
_TYPE = Read(values.matching(values.TYPE, "an instance type, such as g5.12xlarge"), _string(values.TYPE))
_SUBNET = Read(
    values.matching(r"subnet-[0-9a-f]+", "a subnet's id, such as subnet-0a1b2c"), _string("subnet-[0-9a-f]+")
)
_OWNER = Read(values.matching(r"[0-9]{12}|self|amazon|aws-marketplace", "an account's number"), _string())
_KEY = Read(values.tag, {})
_VALUE = Read(values.tag_value, {})

Text = Annotated[str, Read(values.text, _string())]
Line = Annotated[str, Read(values.line, _string(_LINE))]
Name = Annotated[str, Read(values.name, _string(values.NAME))]
_ELSEWHERE = "machines that you rent elsewhere: `cloud: ssh`"
Cloud = Annotated[CloudName, Read(values.one_of(CloudName, _ELSEWHERE), {"enum": [cloud.value for cloud in CloudName]})]
Market = Annotated[MarketName, Read(values.one_of(MarketName), {"enum": [market.value for market in MarketName]})]
Access = Annotated[AccessName, Read(values.one_of(AccessName), {"enum": [access.value for access in AccessName]})]
Usd = Annotated[Decimal, Read(values.usd, _string(_USD, "20 USD"))]
UsdOrNothing = Annotated[Decimal, Read(values.usd_or_nothing, _string(_USD, "2.50 USD"))]
Span = Annotated[timedelta, Read(values.span, _string(_SPAN, "12h", "90 min", "2d 3h"))]
Hold = Annotated[timedelta, Read(values.hold, _string(rf"none|{_SPAN}", "5min", "none"))]
Nodes = Annotated[
    int | values.NodeRange,
    Read(
        values.nodes,
        {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": values.MOST_NODES},
                _string("[0-9]{1,4} ?- ?[0-9]{1,4}", "2-4"),
            ]
        },
    ),
]
GpusPerNode = Annotated[int, _whole(1, 16)]
Keep = Annotated[int, _whole(2, 1000)]
Port = Annotated[int, _whole(1, 65535)]
Percent = Annotated[int, Read(values.percent, {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 99}, _string()]})]
Times = Annotated[float | None, Read(values.times, _string(r"[0-9]+(\.[0-9]+)? ?x|never", "20x", "never"))]
Count = Annotated[int, Read(values.count, {"anyOf": [{"type": "integer", "minimum": 1}, _string(_COUNT, "7B")]})]
PrecisionName = Annotated[Precision, Read(values.one_of(Precision), {"enum": [word.value for word in Precision]})]
OptimizerName = Annotated[Optimizer, Read(values.one_of(Optimizer), {"enum": [word.value for word in Optimizer]})]
StrategyName = Annotated[Strategy, Read(values.one_of(Strategy), {"enum": [word.value for word in Strategy]})]
Policy = Annotated[
    PolicyName, Read(values.policy, {"enum": [values.AUTO_POLICY, *(policy.value for policy in PolicyName)]})
]
Flag = Annotated[bool, Read(values.flag, {"type": "boolean"})]
LauncherName = Annotated[Launcher, Read(values.one_of(Launcher), {"enum": [word.value for word in Launcher]})]
Gate = Annotated[GatePolicy, Read(values.one_of(GatePolicy), {"enum": [word.value for word in GatePolicy]})]
Runtime = Annotated[
    ContainerRuntime, Read(values.one_of(ContainerRuntime), {"enum": [word.value for word in ContainerRuntime]})
]
LayoutName = Annotated[Layout, Read(values.one_of(Layout), {"enum": [word.value for word in Layout]})]
OnNoticeName = Annotated[OnNotice, Read(values.on_notice, {"enum": [word.value for word in OnNotice]})]
Inside = Annotated[str, Read(values.inside, _OUTPUT)]
Words = Annotated[
    tuple[str, ...],
    Read(values.words, {"anyOf": [_string(), {"type": "array", "items": _SCALAR, "minItems": 1}]}),
]
FileName = Annotated[str, Read(values.file_name, _string(r"[^/\n]+"))]
Gib = Annotated[int, Read(values.gib, {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 4096}, _string()]})]
Cadence = Annotated[
    timedelta | int | None,
    Read(values.cadence, _string(rf"auto|[1-9][0-9]* steps?|{_SPAN}", "auto", "10 min", "100 steps")),
]
Store = Annotated[str, Read(values.store, _string(_LINE, "s3://bucket/prefix"))]
GpuModels = Annotated[tuple[Annotated[str, _GPU], ...], BeforeValidator(values.listed), _list_of(_GPU.schema)]
Regions = Annotated[tuple[Annotated[str, _REGION], ...], BeforeValidator(values.listed), _list_of(_REGION.schema)]
Types = Annotated[tuple[Annotated[str, _TYPE], ...], BeforeValidator(values.listed), _list_of(_TYPE.schema)]
Subnets = Annotated[tuple[Annotated[str, _SUBNET], ...], BeforeValidator(values.listed), _list_of(_SUBNET.schema)]
Owners = Annotated[tuple[Annotated[str, _OWNER], ...], BeforeValidator(values.listed), _list_of(_OWNER.schema)]
Image = Annotated[
    str,
    Read(
        values.matching(
            r"deep-learning|ubuntu|ami-[0-9a-f]+|ssm:/[A-Za-z0-9/_.-]+", "deep-learning, ubuntu, ami-… or ssm:/…"
        ),
        _string(_LINE, "deep-learning", "ubuntu", "ami-0a1b2c3d", "ssm:/my/image"),
    ),
]
KmsKey = Annotated[str, Read(values.kms_key, _string(values.KMS_KEY))]
Email = Annotated[str, Read(values.matching(r"[^@\s]+@[^@\s]+\.[^@\s]+", "an e-mail address"), _string(_LINE))]
TopicArn = Annotated[
    str,
    Read(
        values.matching(values.TOPIC, "an SNS topic's ARN, such as arn:aws:sns:us-east-1:123456789012:money"),
        _string(values.TOPIC, "arn:aws:sns:us-east-1:123456789012:money"),
    ),
]
HostAddress = Annotated[
    str, Read(values.matching(values.HOST, "a host's name or address"), _string(values.HOST, "gpu1.lab", "10.0.0.5"))
]
HostKey = Annotated[
    str,
    Read(
        values.matching(values.HOST_KEY, "a public host key, such as ssh-ed25519 AAAA…"),
        _string(values.HOST_KEY, "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA"),
    ),
]
HOST = BeforeValidator(values.host)
Devices = Annotated[
    tuple[Annotated[int, _whole(0, 15)], ...],
    BeforeValidator(listed),
    _list_of({"type": "integer", "minimum": 0, "maximum": 15}),
]
Driver = Annotated[str, Read(values.driver, {"anyOf": [{"enum": ["auto", "keep"]}, {"type": "integer"}]})]
MigProfile = Annotated[
    str, Read(values.matching(values.MIG, "a MIG profile, such as 3g.71gb"), _string(values.MIG, "1g.18gb"))
]
Url = Annotated[str, Read(values.url, _string(r"https?://\S+"))]
SecretName = Annotated[str, _SECRET]
Secrets = Annotated[tuple[Annotated[str, _SECRET], ...], BeforeValidator(values.listed), _list_of(_SECRET.schema)]
Outputs = Annotated[
    tuple[Annotated[str, Read(values.output, _OUTPUT)], ...], BeforeValidator(values.listed), _list_of(_OUTPUT)
]
Tags = Annotated[
    dict[Annotated[str, _KEY], Annotated[str, _VALUE]], BeforeValidator(values.mapped), _mapping_of(_LINE, _SCALAR)
]
Env = Annotated[
    dict[Annotated[str, Read(values.variable, {})], Annotated[str, Read(values.text_or_empty, {})]],
    BeforeValidator(values.mapped),
    _mapping_of(values.VARIABLE, _SCALAR),
]
Patterns = Annotated[
    dict[
        Annotated[str, Read(values.matching(_METRIC, "the name of a metric, such as loss"), {})],
        Annotated[str, Read(lambda value: compiled(values.line(value)).pattern, {})],
    ],
    BeforeValidator(values.mapped),
    _mapping_of(_METRIC, _string(_LINE, r"iter (\d+)")),
]
Data = Annotated[
    dict[Annotated[str, Read(values.store, {})], Annotated[str, Read(values.target, {})]],
    BeforeValidator(values.mapped),
    _mapping_of(_LINE, _string(r"/[^\n]+")),
]
