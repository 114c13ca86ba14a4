# What the machines of one region stand on. It costs nothing while it stands, but for the NAT gateway of `private`.
#
# Settings that make AWS's provider wait are left at their defaults: DNS host names and public addresses by the subnet
# cost 10 s each; the launch template asks for the address instead.

data "aws_partition" "this" {}

data "aws_caller_identity" "this" {}

locals {
  name = "gpucloud-${var.region}"
  tags = merge(var.tags, { "gpucloud:managed" = "true", "gpucloud:base" = var.region })

  # Subnets 0 to 7 are the public ones of the zones a to h, 8 to 15 the private ones.
  number = { for zone in var.zones : zone => index(split("", "abcdefgh"), substr(zone, -1, 1)) }

  nat_zone = coalesce(var.nat_zone, sort(var.zones)[0])
}

resource "aws_vpc" "this" {
  cidr_block = var.cidr
  tags       = merge(local.tags, { Name = local.name })
}

resource "aws_internet_gateway" "this" {
  vpc_id = aws_vpc.this.id
  tags   = merge(local.tags, { Name = local.name })
}

resource "aws_subnet" "public" {
  for_each = local.number

  vpc_id            = aws_vpc.this.id
  availability_zone = each.key
  cidr_block        = cidrsubnet(var.cidr, 4, each.value)
  tags              = merge(local.tags, { Name = "${local.name}-public-${each.key}" })
}

resource "aws_route_table" "public" {
  vpc_id = aws_vpc.this.id
  tags   = merge(local.tags, { Name = "${local.name}-public" })
}

resource "aws_route" "public" {
  route_table_id         = aws_route_table.public.id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this.id
}

resource "aws_route_table_association" "public" {
  for_each = aws_subnet.public

  subnet_id      = each.value.id
  route_table_id = aws_route_table.public.id
}

# Checkpoints go to S3 without crossing the NAT gateway, which charges for each GB.
resource "aws_vpc_endpoint" "s3" {
  vpc_id            = aws_vpc.this.id
  service_name      = "com.amazonaws.${var.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = concat([aws_route_table.public.id], aws_route_table.private[*].id)
  tags              = merge(local.tags, { Name = "${local.name}-s3" })
}

resource "aws_security_group" "nodes" {
  name        = "${local.name}-nodes"
  description = "Machines of gpucloud: the way out, and nothing in"
  vpc_id      = aws_vpc.this.id
  tags        = merge(local.tags, { Name = "${local.name}-nodes" })
}

resource "aws_vpc_security_group_egress_rule" "internet" {
  security_group_id = aws_security_group.nodes.id
  description       = "packages, S3 and the interfaces of AWS"
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "-1"
  tags              = local.tags
}
