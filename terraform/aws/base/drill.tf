# The Fault Injection Service takes a spot machine as AWS itself would, with its two-minute notice. Gpucloud's only.

locals {
  drill_trust = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "fis.amazonaws.com" } # in every partition
      Condition = { StringEquals = { "aws:SourceAccount" = data.aws_caller_identity.this.account_id } }
    }]
  })

  drill_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "Interrupt"
        Effect    = "Allow"
        Action    = "ec2:SendSpotInstanceInterruptions"
        Resource  = "arn:${data.aws_partition.this.partition}:ec2:${var.region}:${data.aws_caller_identity.this.account_id}:instance/*"
        Condition = { StringEquals = { "aws:ResourceTag/gpucloud:managed" = "true" } }
      },
      {
        Sid      = "FindTargets"
        Effect   = "Allow"
        Action   = "ec2:DescribeInstances"
        Resource = "*"
      },
    ]
  })
}

resource "aws_iam_role" "drill" {
  count = var.drill_role ? 1 : 0

  name                 = "gpucloud-base.drill-${var.region}" # a cluster's role is gpucloud-<job>-<region>: no job has a dot
  description          = "Interrupts machines of gpucloud as a drill"
  assume_role_policy   = local.drill_trust
  permissions_boundary = var.permissions_boundary
  tags                 = local.tags
}

resource "aws_iam_role_policy" "drill" {
  count = var.drill_role ? 1 : 0

  name   = "drill"
  role   = aws_iam_role.drill[0].name
  policy = local.drill_policy
}
