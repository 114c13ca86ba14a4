"""AWS's errors become ours: class, words, next step."""

from __future__ import annotations

import inspect

import botocore.exceptions
import pytest
from botocore.exceptions import ClientError

from gpucloud.adapters.aws.faults import CODES, code_in, code_of, explained, known
from gpucloud.domain.errors import CredentialsError, GpucloudError, ProvisionError
from gpucloud.domain.node.node import Fault

FAULTS = {
    "InsufficientInstanceCapacity": Fault.CAPACITY,
    "UnfulfillableCapacity": Fault.CAPACITY,
    "InsufficientHostCapacity": Fault.CAPACITY,
    "InsufficientReservedInstanceCapacity": Fault.CAPACITY,
    "ReservationCapacityExceeded": Fault.CAPACITY,
    "Unsupported": Fault.CAPACITY,
    "InsufficientFreeAddressesInSubnet": Fault.CAPACITY,
    "SpotMaxPriceTooLow": Fault.CAPACITY,
    "Server.InsufficientInstanceCapacity": Fault.CAPACITY,
    "MaxSpotInstanceCountExceeded": Fault.QUOTA,
    "MaxFleetCountExceeded": Fault.QUOTA,
    "VcpuLimitExceeded": Fault.QUOTA,
    "InstanceLimitExceeded": Fault.QUOTA,
    "VolumeLimitExceeded": Fault.QUOTA,
    "Client.VolumeLimitExceeded": Fault.QUOTA,
    "VpcLimitExceeded": Fault.QUOTA,
    "AddressLimitExceeded": Fault.QUOTA,
    "NetworkInterfaceLimitExceeded": Fault.QUOTA,
    "ExpiredToken": Fault.CREDENTIALS,
    "ExpiredTokenException": Fault.CREDENTIALS,
    "AuthFailure": Fault.CREDENTIALS,
    "InvalidClientTokenId": Fault.CREDENTIALS,
    "UnrecognizedClientException": Fault.CREDENTIALS,
    "InvalidAccessKeyId": Fault.CREDENTIALS,
    "SignatureDoesNotMatch": Fault.CREDENTIALS,
    "RequestExpired": Fault.CREDENTIALS,
    "NoCredentialsError": Fault.CREDENTIALS,
    "TokenRetrievalError": Fault.CREDENTIALS,
    "SSOTokenLoadError": Fault.CREDENTIALS,
    "UnauthorizedSSOTokenError": Fault.CREDENTIALS,
    "PartialCredentialsError": Fault.CREDENTIALS,
    "CredentialRetrievalError": Fault.CREDENTIALS,
    "UnauthorizedOperation": Fault.PERMISSION,
    "AccessDenied": Fault.PERMISSION,
    "AccessDeniedException": Fault.PERMISSION,
    "OptInRequired": Fault.PERMISSION,
    "PendingVerification": Fault.PERMISSION,
    "Client.InternalError": Fault.PERMISSION,
    "InvalidKMSKey.InvalidState": Fault.PERMISSION,
    "KMSKeyNotAccessible": Fault.PERMISSION,
    "InvalidAMIID.NotFound": Fault.PARAMETER,
    "InvalidParameterValue": Fault.PARAMETER,
    "InvalidSubnetID.NotFound": Fault.PARAMETER,
    "InvalidKeyPair.NotFound": Fault.PARAMETER,
    "InvalidGroup.NotFound": Fault.PARAMETER,
    "InvalidCapacityReservationId.NotFound": Fault.PARAMETER,
    "ValidationError": Fault.PARAMETER,
    "RequestLimitExceeded": Fault.THROTTLING,
    "Throttling": Fault.THROTTLING,
    "ThrottlingException": Fault.THROTTLING,
    "SlowDown": Fault.THROTTLING,
    "TooManyRequestsException": Fault.THROTTLING,
    "ResourceContention": Fault.THROTTLING,
    "InternalError": Fault.TRANSIENT,
    "Server.InternalError": Fault.TRANSIENT,
    "InternalFailure": Fault.TRANSIENT,
    "ServiceUnavailable": Fault.TRANSIENT,
    "Unavailable": Fault.TRANSIENT,
    "RequestTimeout": Fault.TRANSIENT,
    "EndpointConnectionError": Fault.TRANSIENT,
    "ConnectTimeoutError": Fault.TRANSIENT,
    "ReadTimeoutError": Fault.TRANSIENT,
    "ConnectionClosedError": Fault.TRANSIENT,
    "InvalidInstanceID.NotFound": Fault.TRANSIENT,
    "ScalingActivityInProgress": Fault.TRANSIENT,
    "AnythingNew": Fault.UNKNOWN,
    "": Fault.UNKNOWN,
}
PROSE = {
    "We currently do not have sufficient g4dn.xlarge capacity in the Availability Zone you requested (us-east-1a). "
    "Our system will be working on provisioning additional capacity. You can currently get g4dn.xlarge capacity by "
    "not specifying an Availability Zone in your request or choosing us-east-1b. Launching EC2 instance failed.": (
        "InsufficientInstanceCapacity"
    ),
    "There is no Spot capacity available that matches your request. Launching EC2 instance failed.": (
        "InsufficientInstanceCapacity"
    ),
    "Server.InsufficientInstanceCapacity: There was insufficient capacity available to satisfy the launch request.": (
        "InsufficientInstanceCapacity"
    ),
    "Could not launch Spot Instances. UnfulfillableCapacity - Unable to fulfill capacity due to your request "
    "configuration. Please adjust your request and try again. Launching EC2 instance failed.": "UnfulfillableCapacity",
    "Could not launch Spot Instances. MaxSpotInstanceCountExceeded - Max spot instance count exceeded. Launching EC2 "
    "instance failed.": "MaxSpotInstanceCountExceeded",
    "Max spot instance count exceeded. Launching EC2 instance failed.": "MaxSpotInstanceCountExceeded",
    "You have requested more vCPU capacity than your current vCPU limit of 0 allows for the instance bucket that the "
    "specified instance type belongs to. Please visit http://aws.amazon.com/contact-us/ec2-request to request an "
    "adjustment to this limit. Launching EC2 instance failed.": "VcpuLimitExceeded",
    "You have requested more instances (5) than your current instance limit of 4 allows for the specified instance "
    "type.": "InstanceLimitExceeded",
    "Your requested instance type (p4d.24xlarge) is not supported in your requested Availability Zone (us-east-1e). "
    "Please retry your request by not specifying an Availability Zone.": "Unsupported",
    "The requested configuration is currently not supported. Please check the documentation for supported "
    "configurations. Launching EC2 instance failed.": "Unsupported",
    "There are not enough free addresses in subnet 'subnet-0abc' to satisfy the requested number of instances.": (
        "InsufficientFreeAddressesInSubnet"
    ),
    "Your Spot request price of 0.01 is lower than the minimum required Spot request fulfillment price of 0.2.": (
        "SpotMaxPriceTooLow"
    ),
    "Instance became unhealthy while waiting for instance to be in InService state. Termination Reason: "
    "Client.InternalError: Client error on launch": "Client.InternalError",
    "Client error on launch": "Client.InternalError",
    "Client.InvalidKMSKey.InvalidState: The KMS key provided is in an incorrect state": (
        "Client.InvalidKMSKey.InvalidState"
    ),
    "The specified key arn:aws:kms:us-east-1:123456789012:key/1 does not exist.": "Client.InternalError",
    "The key pair 'gpucloud-digits' does not exist. Launching EC2 instance failed.": "InvalidKeyPair.NotFound",
    "You are not authorized to perform this operation. Encoded authorization failure message: aGVsbG8": (
        "UnauthorizedOperation"
    ),
    "You are not authorized to use launch template: lt-0abc": "UnauthorizedOperation",
    "Access denied when attempting to assume role arn:aws:iam::123456789012:role/x.": "UnauthorizedOperation",
    "The provided credentials do not have permission to create the service-linked role for EC2 Spot Instances.": (
        "AuthFailure.ServiceLinkedRoleCreationNotPermitted"
    ),
    "The image id '[ami-0abc]' does not exist. Launching EC2 instance failed.": "InvalidAMIID.NotFound",
    "The security group 'sg-0abc' does not exist. Launching EC2 instance failed.": "InvalidGroup.NotFound",
    "The subnet ID 'subnet-0abc' does not exist": "InvalidSubnetID.NotFound",
    "Client.VolumeLimitExceeded: Volume limit exceeded": "VolumeLimitExceeded",
    "Server.InternalError: An internal error caused the instance to terminate during launch.": "InternalError",
    "The requested reservation does not have sufficient compatible and available capacity for this request.": (
        "ReservationCapacityExceeded"
    ),
    "Your account is currently being verified. Verification normally takes less than 2 hours.": "PendingVerification",
    "Request limit exceeded. Launching EC2 instance failed.": "RequestLimitExceeded",
    "EC2ThrottledException: AWS was asked too often. Launching EC2 instance failed.": "EC2ThrottledException",
    "AdoptingKmsishThingsFailed: something new": "",
    "An instance was launched in response to an unhealthy instance.": "",
    "": "",
}
CLASSES = [kind for _, kind in inspect.getmembers(botocore.exceptions, inspect.isclass)]


def client_error(code: str, message: str = "as AWS says it") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, "RunInstances")


@pytest.mark.parametrize(("code", "fault"), FAULTS.items())
def test_a_code_has_one_meaning(code: str, fault: Fault):
    assert known(code).fault is fault


@pytest.mark.parametrize("code", CODES)
def test_every_known_code_says_one_line_and_a_step(code: str):
    meaning = known(code)
    assert meaning.line
    assert meaning.step
    assert "\n" not in meaning.line + meaning.step


def test_a_used_up_quota_names_the_command_that_asks_for_more():
    assert "`gpucloud quota request JOB`" in known("VcpuLimitExceeded").step


@pytest.mark.parametrize(("text", "code"), PROSE.items())
def test_prose_is_read_as_the_code_behind_it(text: str, code: str):
    assert code_in(text) == code


def test_an_expired_token_is_a_credentials_error_with_the_way_to_log_in():
    with pytest.raises(CredentialsError) as caught, explained("list machines"):
        raise client_error("ExpiredToken")
    assert caught.value.message == "cannot list machines: the credentials have expired (ExpiredToken)"
    assert caught.value.hint == "log in again: `aws sso login`, or renew the keys with `aws configure`"


def test_a_missing_permission_names_the_action():
    said = (
        "You are not authorized. User: arn:aws:iam::1:user/a is not authorized to perform: ec2:RunInstances on resource"
    )
    with pytest.raises(ProvisionError) as caught, explained("start machines"):
        raise client_error("UnauthorizedOperation", said)
    assert caught.value.message == (
        "cannot start machines: this identity may not do that: ec2:RunInstances (UnauthorizedOperation)"
    )


def test_a_refused_value_is_told_in_the_words_of_aws():
    with pytest.raises(ProvisionError) as caught, explained("start machines"):
        raise client_error("InvalidParameterValue", "Invalid IAM Instance Profile name")
    assert caught.value.message == (
        "cannot start machines: AWS refuses a value: Invalid IAM Instance Profile name (InvalidParameterValue)"
    )


def test_an_unknown_code_is_told_in_the_words_of_aws():
    with pytest.raises(ProvisionError) as caught, explained("start machines"):
        raise client_error("Novelty", "never seen")
    assert caught.value.message == "cannot start machines: never seen (Novelty)"


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_of_botocore_becomes_ours(kind: type[Exception]):
    if issubclass(kind, ClientError):
        error: Exception = kind({"Error": {"Code": "Throttling"}}, "x")
    elif issubclass(kind, botocore.exceptions.BotoCoreError):
        error = kind.__new__(kind)
        Exception.__init__(error, "x")
    else:
        return
    with pytest.raises(GpucloudError), explained("x"):
        raise error


def test_an_error_of_the_connection_has_no_words_of_aws():
    with pytest.raises(ProvisionError) as caught, explained("list machines"):
        raise botocore.exceptions.ReadTimeoutError(endpoint_url="https://x", error=None)
    assert caught.value.message == "cannot list machines: AWS did not answer in time (ReadTimeoutError)"


def test_a_code_is_read_from_an_error_of_any_kind():
    assert code_of(client_error("SlowDown")) == "SlowDown"
    assert code_of(botocore.exceptions.NoCredentialsError()) == "NoCredentialsError"
    assert code_of(ValueError()) == "ValueError"
