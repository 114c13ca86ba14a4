# Machines without a public address: those with several EFA interfaces, to which AWS gives none, or all by choice.

resource "aws_subnet" "private" {
  for_each = var.private ? local.number : {}

  vpc_id            = aws_vpc.this.id
  availability_zone = each.key
  cidr_block        = cidrsubnet(var.cidr, 4, 8 + each.value)
  tags              = merge(local.tags, { Name = "${local.name}-private-${each.key}" })
}

resource "aws_eip" "nat" {
  count = var.private ? 1 : 0

  domain     = "vpc"
  tags       = merge(local.tags, { Name = "${local.name}-nat" })
  depends_on = [aws_internet_gateway.this]
}

resource "aws_nat_gateway" "this" {
  count = var.private ? 1 : 0

  allocation_id = aws_eip.nat[0].id
  subnet_id     = aws_subnet.public[local.nat_zone].id
  tags          = merge(local.tags, { Name = local.name })
  depends_on    = [aws_route.public]
}

resource "aws_route_table" "private" {
  count = var.private ? 1 : 0

  vpc_id = aws_vpc.this.id
  tags   = merge(local.tags, { Name = "${local.name}-private" })
}

resource "aws_route" "private" {
  count = var.private ? 1 : 0

  route_table_id         = aws_route_table.private[0].id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this[0].id
}

resource "aws_route_table_association" "private" {
  for_each = aws_subnet.private

  subnet_id      = each.value.id
  route_table_id = aws_route_table.private[0].id
}
