# What may come in: machine to machine within this cluster (no other job's), and SSH from the caller's addresses.

resource "aws_security_group" "this" {
  name        = "${var.name}-ssh"
  description = "Machines of one cluster among themselves, and SSH from who runs it"
  vpc_id      = var.network.vpc_id
  tags        = merge(local.tags, { Name = "${var.name}-ssh" })
}

resource "aws_vpc_security_group_ingress_rule" "ssh" {
  count = var.ssh == "session_manager" ? 0 : 1

  security_group_id = aws_security_group.this.id
  description       = "SSH from who runs the job"
  cidr_ipv4         = var.access.cidr
  ip_protocol       = "tcp"
  from_port         = 22
  to_port           = 22
  tags              = local.tags
}

resource "aws_vpc_security_group_ingress_rule" "peers" {
  security_group_id            = aws_security_group.this.id
  description                  = "from the machines of the cluster"
  referenced_security_group_id = aws_security_group.this.id
  ip_protocol                  = "-1"
  tags                         = local.tags
}

# EFA needs it in this form: what goes to 0.0.0.0/0 is IP, and EFA is not.
resource "aws_vpc_security_group_egress_rule" "peers" {
  security_group_id            = aws_security_group.this.id
  description                  = "to the machines of the cluster"
  referenced_security_group_id = aws_security_group.this.id
  ip_protocol                  = "-1"
  tags                         = local.tags
}

resource "aws_vpc_security_group_egress_rule" "internet" {
  count = length(var.network.security_group_ids) == 0 ? 1 : 0

  security_group_id = aws_security_group.this.id
  description       = "packages, S3 and the interfaces of AWS"
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "-1"
  tags              = local.tags
}
