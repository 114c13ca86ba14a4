"""What went wrong at AWS, in our words: a code's meaning, and errors of boto3 as errors of gpucloud."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import botocore.exceptions

from gpucloud.domain.errors import CredentialsError, ProvisionError
from gpucloud.domain.node.node import Fault


def known(code: str) -> Known:
    """Return what the code means; a code that is not in the table is UNKNOWN: stop safely."""
    return CODES.get(code) or CODES.get(_bare(code)) or UNKNOWN


def known_of_new(code: str, text: str) -> Known:
    """Return what the code means in a cluster that was made a moment ago; `text` is what AWS says beside it."""
    new = _bare(code) in SETTLING or "iam instance profile" in text.lower()
    return NOT_YET if new and known(code).fault is Fault.PARAMETER else known(code)


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn boto3's errors in the block into CredentialsError or ProvisionError: "cannot <what>: <line> (<code>)"."""
    try:
        yield
    except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as error:
        meaning = known(code_of(error))
        kind = CredentialsError if meaning.fault is Fault.CREDENTIALS else ProvisionError
        message = f"cannot {what}: {_said(meaning, error)} ({code_of(error)})"
        may_pass = meaning.fault in (Fault.THROTTLING, Fault.TRANSIENT)
        raise kind(message, hint=meaning.step, may_pass=may_pass) from error


def code_of(error: BaseException) -> str:
    """Return AWS's code of an error, else the name of botocore's class."""
    return _part(error, "Code") or type(error).__name__


def code_in(text: str) -> str:
    """Return the code behind a scaling activity's message or an instance's state reason; "" when there is none.

    A code that stands in the text is taken as it stands; else the words that AWS uses for one decide.
    """
    for word in re.findall(r"[A-Za-z][A-Za-z0-9]*(?:\.[A-Za-z][A-Za-z0-9]*)*", text):
        # Words of one hump ("Throttling", "Unsupported", "Blocked") are plain English too.
        if re.search(r"[a-z][A-Z]", word) and known(word) is not UNKNOWN:
            return word if word in CODES else _bare(word)
    return next((code for words, code in PROSE if re.search(words, text, re.IGNORECASE)), "")


def _bare(code: str) -> str:
    return re.sub(r"^(Client|Server)\.", "", code)


def _part(error: BaseException, name: str) -> str:
    # Errors of the connection have a `response` too, which is None.
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get(name, "")) if isinstance(response, dict) else ""


def _said(meaning: Known, error: Exception) -> str:
    """What people are told: our line, with the part of AWS's own words that no table can know."""
    own = _part(error, "Message") or str(error)
    match meaning.fault:
        case Fault.PERMISSION:
            action = re.search(r"not authorized to perform: ([\w:*-]+)", own)
            return f"{meaning.line}: {action[1]}" if action else meaning.line
        case Fault.PARAMETER:
            return f"{meaning.line}: {own[:300]}"
        case Fault.UNKNOWN:
            return own[:300]
        case Fault.CAPACITY | Fault.QUOTA | Fault.CREDENTIALS | Fault.THROTTLING | Fault.TRANSIENT:
            return meaning.line


# AWS's error codes: what kind each is, one line for people, and the next step.
#
# Sources: the error code lists of EC2, Auto Scaling, S3, STS, IAM, SSM and Service Quotas, botocore's exceptions, and
# karpenter's pkg/errors/errors.go (which codes mean that there is no capacity). A code with `Client.` or `Server.` in
# front is an instance's state reason; it means the same without it, unless it is listed with it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a code means: `line` says it to people, `step` is the hint."""

    fault: Fault
    line: str
    step: str


UNKNOWN = Known(fault=Fault.UNKNOWN, line="", step="nothing more is started; look the code up, then the same command")

_OTHER_POOL = "another pool is tried; more `regions` or GPU models under `resources` give it more of them"
_QUOTA = "`gpucloud quota request JOB` asks AWS for more; another region or GPU model has a quota of its own"
_LOGIN = "log in again: `aws sso login`, or renew the keys with `aws configure`"
_KEYS = "correct the keys: `aws configure`, or name another profile under `aws: {profile: …}`"
_NOBODY = "log in: `aws sso login`, `aws configure`, or AWS_PROFILE=…"
_POLICY = "attach the policy that `gpucloud iam policy` prints to this identity"
_KMS = "let the role AWSServiceRoleForAutoScaling use the key (kms:CreateGrant), or leave `aws: {kms_key: …}` out"
_OWN = "correct the `aws:` section of the job file"
_STACK = "make it anew: `gpucloud up JOB`"
_SLOWER = "wait a minute, then the same command; other programs in this account may be calling too often"
_AGAIN = "the same command again; https://health.aws.amazon.com says whether AWS has trouble"
_NETWORK = "check the network and AWS_ENDPOINT_URL, then the same command"


NOT_YET = Known(
    fault=Fault.TRANSIENT,
    line="AWS does not know everything yet that was made a moment ago",
    step="nothing: it is asked again",
)
"""What a code of `SETTLING` means in a cluster's first minutes: IAM and EC2 learn of new things one after the other."""


def _each(fault: Fault, step: str, lines: dict[str, str]) -> dict[str, Known]:
    return {code: Known(fault=fault, line=line, step=step) for code, line in lines.items()}


CODES: dict[str, Known] = {
    **_each(
        Fault.CAPACITY,
        _OTHER_POOL,
        {
            "InsufficientInstanceCapacity": "AWS has no such machine free in this zone now",
            "InsufficientHostCapacity": "AWS has no host free for such a machine in this zone now",
            "InsufficientCapacity": "AWS has no such machine free now",
            "InsufficientCapacityOnHost": "the host has no room for such a machine now",
            "InsufficientReservedInstanceCapacity": "AWS has none of the reserved machines free now",
            "InsufficientVolumeCapacity": "AWS has no room for the machine's disk in this zone now",
            "UnfulfillableCapacity": "AWS cannot give such machines in this zone now",
            "ReservationCapacityExceeded": "the capacity reservation has no free machine left",
            "CapacityReservationCapacityExceeded": "the capacity reservation has no free machine left",
            "Unsupported": "AWS does not offer this machine in this zone",
            "UnsupportedOperation": "AWS does not offer this here",
            "InsufficientFreeAddressesInSubnet": "the zone's subnet has no free address left",
            "SpotMaxPriceTooLow": "the spot price is above the highest price that was allowed",
        },
    ),
    **_each(
        Fault.QUOTA,
        _QUOTA,
        {
            "MaxSpotInstanceCountExceeded": "the account's quota of spot machines of this family is used up",
            "MaxFleetCountExceeded": "the account's quota of machines is used up",
            "VcpuLimitExceeded": "the account's quota of vCPUs of this machine family is used up",
            "InstanceLimitExceeded": "the account's quota of machines of this type is used up",
            "SpotFleetRequestConfigLimitExceeded": "the account's quota of spot requests is used up",
            "VolumeLimitExceeded": "the account's quota of disks in this region is used up",
            "MaxIOPSLimitExceeded": "the account's quota of disk operations in this region is used up",
            "VpcLimitExceeded": "the account's quota of networks (VPCs) in this region is used up",
            "SubnetLimitExceeded": "the account's quota of subnets in this network is used up",
            "InternetGatewayLimitExceeded": "the account's quota of internet gateways in this region is used up",
            "NatGatewayLimitExceeded": "the account's quota of NAT gateways in this zone is used up",
            "VpcEndpointLimitExceeded": "the account's quota of VPC endpoints in this region is used up",
            "AddressLimitExceeded": "the account's quota of fixed public addresses in this region is used up",
            "NetworkInterfaceLimitExceeded": "the account's quota of network interfaces in this region is used up",
            "SecurityGroupLimitExceeded": "the account's quota of security groups in this region is used up",
            "ResourceLimitExceeded": "a quota of the account is used up",
            "LimitExceeded": "a quota of the account is used up",
            "LimitExceededException": "a quota of the account is used up",
            "ServiceQuotaExceededException": "a quota of the account is used up",
            "QuotaExceededException": "a quota of the account is used up",
            "TooManyBuckets": "the account's quota of buckets is used up",
        },
    ),
    **_each(
        Fault.QUOTA,
        "those that were asked for before are answered still; new ones again within a day",
        {"MaxConfigLimitExceeded": "AWS scores no more new sets of machines for this account now"},
    ),
    **_each(
        Fault.CREDENTIALS,
        _LOGIN,
        {
            "ExpiredToken": "the credentials have expired",
            "ExpiredTokenException": "the credentials have expired",
            "TokenRefreshRequired": "the credentials have expired",
            "RequestExpired": "the credentials have expired, or this machine's clock is wrong",
            "RequestTimeTooSkewed": "this machine's clock is wrong",
            "TokenRetrievalError": "the single sign-on has expired",
            "SSOTokenLoadError": "nobody is logged in by single sign-on",
            "SSOError": "the single sign-on failed",
            "UnauthorizedSSOTokenError": "the single sign-on has expired",
            "PendingAuthorizationExpiredError": "the single sign-on was not confirmed in time",
            "LoginRefreshRequired": "the login has expired",
            "LoginTokenLoadError": "nobody is logged in",
            "CredentialRetrievalError": "the profile's program or role gave no credentials",
        },
    ),
    **_each(
        Fault.CREDENTIALS,
        _NOBODY,
        {
            "NoCredentialsError": "there are no AWS credentials",
            "NoAuthTokenError": "there are no AWS credentials",
        },
    ),
    **_each(
        Fault.CREDENTIALS,
        _KEYS,
        {
            "AuthFailure": "AWS does not know these credentials",
            "InvalidClientTokenId": "AWS does not know these credentials",
            "UnrecognizedClientException": "AWS does not know these credentials",
            "InvalidAccessKeyId": "AWS does not know these credentials",
            "InvalidToken": "AWS does not know these credentials",
            "NotAuthorizedException": "AWS does not know these credentials",
            "MissingAuthenticationToken": "no credentials were sent",
            "MissingAuthenticationTokenException": "no credentials were sent",
            "SignatureDoesNotMatch": "the secret key does not belong to the access key",
            "InvalidSignatureException": "the secret key does not belong to the access key",
            "IncompleteSignature": "the secret key is not whole",
            "PartialCredentialsError": "half of the AWS credentials is missing",
            "InvalidConfigError": "the profile in ~/.aws/config is not complete",
            "ConfigParseError": "~/.aws/config cannot be read",
            "ProfileNotFound": "there is no such AWS profile",
        },
    ),
    **_each(
        Fault.PERMISSION,
        _POLICY,
        {
            "UnauthorizedOperation": "this identity may not do that",
            "AccessDenied": "this identity may not do that",
            "AccessDeniedException": "this identity may not do that",
            "Forbidden": "this identity may not do that",
            "403": "this identity may not do that",
            "AuthFailure.ServiceLinkedRoleCreationNotPermitted": "this identity may not make AWS's spot role",
        },
    ),
    **_each(
        Fault.PERMISSION,
        _KMS,
        {
            "Client.InternalError": "AWS may not use the key that encrypts the disk",
            "Client.InvalidKMSKey.InvalidState": "the key that encrypts the disk is disabled or being deleted",
            "InvalidKMSKey.InvalidState": "the key that encrypts the disk is disabled or being deleted",
            "InvalidKmsKeyId.NotFound": "there is no such key to encrypt the disk with",
            "KMSKeyNotAccessible": "AWS may not use the key that encrypts the disk",
            "KMSKeyNotAccessibleFault": "AWS may not use the key that encrypts the disk",
            "KMS.NotFoundException": "there is no such key",
            "KMS.DisabledException": "the key is disabled",
            "KMSInvalidStateException": "the key is disabled or being deleted",
        },
    ),
    **_each(
        Fault.PERMISSION,
        "finish what AWS asks for at https://console.aws.amazon.com/billing, then the same command",
        {
            "OptInRequired": "the account has not opted in to this region, service or image",
            "PendingVerification": "AWS is still verifying the account, which can take some hours",
            "Blocked": "AWS has blocked the account",
            "SubscriptionRequiredException": "the account is not subscribed to this service",
        },
    ),
    **_each(
        Fault.PARAMETER,
        _OWN,
        {
            "InvalidAMIID.NotFound": "the machine image is gone, or is not in this region",
            "InvalidAMIID.Malformed": "the machine image's id is not one",
            "InvalidAMIID.Unavailable": "the machine image cannot be used now",
            "ParameterNotFound": "there is no such public parameter in this region",
            "InvalidSubnetID.NotFound": "the subnet is gone, or is not in this region",
            "InvalidCapacityReservationId.NotFound": "there is no such capacity reservation in this region",
            "InvalidCapacityReservationState": "the capacity reservation is not active",
            "InvalidSnapshot.NotFound": "the image's disk is gone",
        },
    ),
    **_each(
        Fault.PARAMETER,
        "wait until AWS has answered it: `gpucloud quota`",
        {"ResourceAlreadyExistsException": "an earlier request for this quota is still open"},
    ),
    **_each(
        Fault.PARAMETER,
        _STACK,
        {
            "InvalidKeyPair.NotFound": "the cluster's key pair is gone",
            "InvalidGroup.NotFound": "a security group of the cluster is gone",
            "InvalidVpcID.NotFound": "the network is gone",
            "InvalidLaunchTemplateId.NotFound": "the cluster's launch template is gone",
            "InvalidLaunchTemplateId.VersionNotFound": "that version of the cluster's launch template is gone",
            "InvalidLaunchTemplateName.NotFoundException": "the cluster's launch template is gone",
            "InvalidPlacementGroup.Unknown": "the cluster's placement group is gone",
            "NoSuchBucket": "the bucket is gone",
            "NoSuchEntity": "the role or profile is gone",
        },
    ),
    **_each(
        Fault.PARAMETER,
        "correct what the message names, then the same command",
        {
            "InvalidParameterValue": "AWS refuses a value",
            "InvalidParameterCombination": "AWS refuses these values together",
            "InvalidParameter": "AWS refuses a value",
            "InvalidInstanceType": "AWS has no such machine type here",
            "MissingParameter": "a value is missing",
            "ValidationError": "AWS refuses a value",
            "ValidationException": "AWS refuses a value",
            "ParamValidationError": "a value cannot be sent to AWS",
            "InvalidRegionError": "there is no such region",
            "PermanentRedirect": "the bucket is in another region",
            "IllegalLocationConstraintException": "the bucket is in another region",
            "BucketAlreadyExists": "the bucket's name belongs to another account",
            "InvalidAction": "this endpoint does not know the call",
        },
    ),
    **_each(
        Fault.THROTTLING,
        _SLOWER,
        {
            "RequestLimitExceeded": "AWS asks for fewer calls",
            "Throttling": "AWS asks for fewer calls",
            "ThrottlingException": "AWS asks for fewer calls",
            "ThrottledException": "AWS asks for fewer calls",
            "RequestThrottled": "AWS asks for fewer calls",
            "RequestThrottledException": "AWS asks for fewer calls",
            "TooManyRequestsException": "AWS asks for fewer calls",
            "SlowDown": "S3 asks for fewer calls",
            "BandwidthLimitExceeded": "AWS asks for fewer calls",
            "EC2ThrottledException": "AWS asks for fewer calls",
            "PriorRequestNotComplete": "AWS is still at work on the call before",
            "ResourceContention": "another call is changing the same thing",
            "ResourceContentionFault": "another call is changing the same thing",
            "IdempotentCallInProgress": "the same call is still at work",
            "ConcurrentModification": "another call is changing the same thing",
            "OperationAborted": "another call is changing the same thing",
        },
    ),
    **_each(
        Fault.TRANSIENT,
        _AGAIN,
        {
            "InternalError": "AWS had an error of its own",
            "InternalFailure": "AWS had an error of its own",
            "InternalServerError": "AWS had an error of its own",
            "ServiceException": "AWS had an error of its own",
            "ServiceUnavailable": "AWS does not answer now",
            "ServiceUnavailableException": "AWS does not answer now",
            "Unavailable": "AWS does not answer now",
            "RequestTimeout": "AWS did not get the whole call in time",
            "RequestTimeoutException": "AWS did not get the whole call in time",
            "500": "AWS had an error of its own",
            "503": "AWS does not answer now",
            "InvalidInstanceID.NotFound": "AWS does not list the machine yet",
            "ScalingActivityInProgress": "the group is still changing",
            "ScalingActivityInProgressFault": "the group is still changing",
            "ResourceInUse": "something still uses it",
            "ResourceInUseFault": "something still uses it",
            "DependencyViolation": "something still uses it",
            "IncorrectState": "it is still changing",
            "IncorrectInstanceState": "the machine is still changing",
        },
    ),
    **_each(
        Fault.TRANSIENT,
        _NETWORK,
        {
            "EndpointConnectionError": "AWS cannot be reached",
            "ConnectionError": "AWS cannot be reached",
            "ConnectTimeoutError": "AWS cannot be reached in time",
            "ReadTimeoutError": "AWS did not answer in time",
            "ConnectionClosedError": "the connection to AWS broke off",
            "ResponseStreamingError": "the connection to AWS broke off",
            "IncompleteReadError": "the connection to AWS broke off",
            "HTTPClientError": "the connection to AWS failed",
            "SSLError": "the connection to AWS is not trusted",
            "ProxyConnectionError": "the proxy cannot be reached",
            "InvalidProxiesConfigError": "the proxy's settings are not complete",
        },
    ),
}

PROSE: tuple[tuple[str, str], ...] = (
    (r"max spot instance count exceeded", "MaxSpotInstanceCountExceeded"),
    (r"more vcpu capacity than your current vcpu limit", "VcpuLimitExceeded"),
    (r"more instances .*than your current instance limit", "InstanceLimitExceeded"),
    (r"exceeded your maximum .* storage|volume limit|maximum number of volumes", "VolumeLimitExceeded"),
    (r"maximum number of network interfaces", "NetworkInterfaceLimitExceeded"),
    (r"maximum number of addresses", "AddressLimitExceeded"),
    (r"maximum fleet|fleet quota|fleet requests", "MaxFleetCountExceeded"),
    (r"(do not have|insufficient|no) (sufficient |spot )?.*capacity", "InsufficientInstanceCapacity"),
    (r"reservation does not have sufficient", "ReservationCapacityExceeded"),
    (r"unable to fulfill capacity", "UnfulfillableCapacity"),
    (r"instance type .*is not supported in your requested availability zone", "Unsupported"),
    (r"requested configuration is currently not supported", "Unsupported"),
    (r"(not enough|insufficient) free (ip )?addresses", "InsufficientFreeAddressesInSubnet"),
    (r"lower than the minimum required spot request fulfillment price", "SpotMaxPriceTooLow"),
    (r"service-linked role", "AuthFailure.ServiceLinkedRoleCreationNotPermitted"),
    (
        r"\bkms\b|client error on launch|encrypt|the (specified|provided) (customer master |cmk )?key ",
        "Client.InternalError",
    ),
    (r"key pair .*does not exist", "InvalidKeyPair.NotFound"),
    (r"not authorized|access denied|do(es)? not have permission", "UnauthorizedOperation"),
    (r"being verified|is being validated|pending verification", "PendingVerification"),
    (r"blocked and not recognized", "Blocked"),
    (r"accept terms and subscribe|\bopt.?in\b", "OptInRequired"),
    (r"(ami|image) (id )?.*(does not exist|not found)", "InvalidAMIID.NotFound"),
    (r"security group .*(does not exist|not found)", "InvalidGroup.NotFound"),
    (r"subnet .*(does not exist|not found)", "InvalidSubnetID.NotFound"),
    (r"launch template .*(does not exist|not found)", "InvalidLaunchTemplateId.NotFound"),
    (r"placement group .*(unknown|does not exist)", "InvalidPlacementGroup.Unknown"),
    (r"invalid iam instance profile", "InvalidParameterValue"),
    (r"request limit exceeded|rate exceeded", "RequestLimitExceeded"),
    (r"internal error", "InternalError"),
)
"""What AWS writes for people where it gives no code, as regular expressions; the first that fits is right."""

SETTLING = (
    "InvalidGroup.NotFound",
    "InvalidKeyPair.NotFound",
    "InvalidLaunchTemplateId.NotFound",
    "InvalidLaunchTemplateId.VersionNotFound",
    "InvalidLaunchTemplateName.NotFoundException",
    "InvalidPlacementGroup.Unknown",
    "InvalidSubnetID.NotFound",
)
"""Codes of things that are gone, or not known everywhere yet."""
