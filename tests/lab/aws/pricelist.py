"""The Price List of the emulated AWS: what the package's catalog lists for us-east-1, in every region."""

from __future__ import annotations

import json

from gpucloud.adapters.aws.prices import catalog
from tests.lab.aws.calls import Call
from tests.lab.aws.faults import Reply


def answer(call: Call) -> Reply | None:
    """Return the reply to GetProducts, all products on one page; None: not ours."""
    if call.service != "pricing" or call.action != "GetProducts":
        return None
    listed = catalog.load().prices["us-east-1"].usd_per_hour
    products = [_product(name, str(usd)) for name, usd in sorted(listed.items())]
    return 200, "application/x-amz-json-1.1", json.dumps({"FormatVersion": "aws_v1", "PriceList": products}).encode()


def _product(name: str, usd: str) -> str:
    dimension = {"unit": "Hrs", "pricePerUnit": {"USD": usd}}
    terms = {"OnDemand": {"T": {"priceDimensions": {"D": dimension}}}}
    return json.dumps({"product": {"attributes": {"instanceType": name}}, "terms": terms})
