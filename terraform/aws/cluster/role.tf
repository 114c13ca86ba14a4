# What a machine may do, and so whatever runs on it: read its job, write what nodes write, its own host key, lower its own
# group; and of a job that drives itself, to keep its state, see its own group and replace a machine of it. Never more
# machines, nor for longer, and never what the user's side alone says (`control/`).

locals {
  own_role = var.machine.instance_profile == null
  role     = "${var.name}-${var.region}" # roles and profiles have no region of their own
  profile  = local.own_role ? local.role : var.machine.instance_profile

  # s3://bucket/prefix → the bucket, and the prefix with its slash (empty without one). No S3 for another kind of store.
  in_s3  = startswith(var.store, "s3://")
  parts  = split("/", trimsuffix(trimprefix(var.store, "s3://"), "/"))
  bucket = "${local.arn}:s3:::${local.parts[0]}"
  prefix = length(local.parts) > 1 ? "${join("/", slice(local.parts, 1, length(local.parts)))}/" : ""

  kms_key = (
    startswith(coalesce(var.machine.kms_key, "arn:"), "arn:") ? var.machine.kms_key :
    "${local.arn}:kms:${var.region}:${local.account}:key/${var.machine.kms_key}"
  )
  # A store stays in its region when its job moves to another: there a multi-Region key has the same id.
  store_region = can(regex("key/mrk-", local.kms_key)) ? "*" : var.region
  store_key    = local.kms_key == null ? null : replace(local.kms_key, ":${var.region}:", ":${local.store_region}:")

  job_objects = "${local.bucket}/${local.prefix}jobs/${local.job}"
  written = concat(
    ["checkpoints/*", "outputs/*", "status/*"],
    !var.unattended ? [] : [
      "events/*",
      "launches/*",
      "ledger/*",
      "logs/*",
      "metrics/*",
      "profiles/*",
      "state.json",
    ],
  )

  # S3 answers 404 for a missing key, and not 403, only to who may list it: it judges the key as if it were a prefix.
  store_statements = [
    {
      Sid       = "ListJob"
      Effect    = "Allow"
      Action    = ["s3:ListBucket"]
      Resource  = [local.bucket]
      Condition = { StringLike = { "s3:prefix" = ["${local.prefix}jobs/${local.job}/*"] } }
    },
    {
      Sid      = "ReadJob"
      Effect   = "Allow"
      Action   = ["s3:GetObject"]
      Resource = ["${local.job_objects}/*"]
    },
    {
      Sid      = "WriteJob"
      Effect   = "Allow"
      Action   = ["s3:AbortMultipartUpload", "s3:PutObject"]
      Resource = [for name in local.written : "${local.job_objects}/${name}"]
    },
    {
      # What newer checkpoints stand for.
      Sid      = "Prune"
      Effect   = "Allow"
      Action   = ["s3:DeleteObject"]
      Resource = ["${local.job_objects}/checkpoints/*"]
    },
    {
      # <role id>:<instance id>: no machine can write another one's key.
      Sid      = "HostKey"
      Effect   = "Allow"
      Action   = ["s3:PutObject"]
      Resource = ["${local.bucket}/${local.prefix}clusters/${var.name}/hosts/$${aws:userid}"]
    },
    {
      # What it must know and run to make itself fit; it cannot change what others read there.
      Sid      = "Record"
      Effect   = "Allow"
      Action   = ["s3:GetObject"]
      Resource = [for name in ["gpucloud-*.zip", "node.json"] : "${local.bucket}/${local.prefix}clusters/${var.name}/${name}"]
    },
  ]

  # A prefix is one object, or a folder of them. Nothing is listed: the machines are told what there is.
  data_paths = [for source in var.data : trimsuffix(trimprefix(source, "s3://"), "/")]
  data_statements = [
    for paths in [local.data_paths] : {
      Sid      = "Data"
      Effect   = "Allow"
      Action   = ["s3:GetObject"]
      Resource = flatten([for path in paths : concat(strcontains(path, "/") ? ["${local.arn}:s3:::${path}"] : [], ["${local.arn}:s3:::${path}/*"])])
    } if length(paths) > 0
  ]

  kms_statements = [
    for key in compact([local.store_key]) : {
      Sid       = "StoreKey"
      Effect    = "Allow"
      Action    = ["kms:Decrypt", "kms:GenerateDataKey"]
      Resource  = [key]
      Condition = { StringLike = { "kms:ViaService" = ["s3.${local.store_region}.${data.aws_partition.this.dns_suffix}"] } }
    }
  ]

  group = "${local.arn}:autoscaling:${var.region}:${local.account}:autoScalingGroup:*:autoScalingGroupName/${var.name}"

  # Raising the limit is not among it: a machine that was taken over must not be able to buy more machines. Nor is any
  # other change of the group: one call that lowers it could protect later machines from its end. The minimum is always 0.
  group_statements = [
    {
      Sid      = "Level"
      Effect   = "Allow"
      Action   = ["autoscaling:SetDesiredCapacity"]
      Resource = [local.group]
      Condition = {
        StringEquals = { "aws:ResourceTag/gpucloud:cluster" = [var.name] }
      }
    },
  ]

  # What a job that drives itself needs beside: its order, its peers' host keys, and to see and replace machines. It may
  # list what stands in the region, for AWS lets nobody list a part of it.
  drive_store_statements = [
    {
      # A missing order is 404 only to who may list; a driver must tell that from an order that it may not read.
      Sid       = "FindOrder"
      Effect    = "Allow"
      Action    = ["s3:ListBucket"]
      Resource  = [local.bucket]
      Condition = { StringEquals = { "s3:prefix" = ["${local.prefix}clusters/${var.name}/drive.json"] } }
    },
    {
      Sid      = "Order"
      Effect   = "Allow"
      Action   = ["s3:GetObject"]
      Resource = [for name in ["drive.json", "hosts/*"] : "${local.bucket}/${local.prefix}clusters/${var.name}/${name}"]
    },
  ]
  drive_statements = [
    {
      Sid    = "Look"
      Effect = "Allow"
      Action = [
        "autoscaling:DescribeAutoScalingGroups",
        "autoscaling:DescribeScalingActivities",
        "autoscaling:DescribeScheduledActions",
        "ec2:DescribeInstances",
        "ec2:DescribeSpotPriceHistory",
      ]
      Resource  = ["*"]
      Condition = { StringEquals = { "aws:RequestedRegion" = [var.region] } }
    },
    {
      Sid       = "Replace"
      Effect    = "Allow"
      Action    = ["autoscaling:TerminateInstanceInAutoScalingGroup"]
      Resource  = [local.group]
      Condition = { StringEquals = { "aws:ResourceTag/gpucloud:cluster" = [var.name] } }
    },
  ]

  # What AWS's agent needs to be reached: its channels. The managed policy for it reads every parameter besides.
  session_statements = [
    {
      Sid      = "Channels"
      Effect   = "Allow"
      Action   = [for pair in setproduct(["Create", "Open"], ["Control", "Data"]) : "ssmmessages:${join("", pair)}Channel"]
      Resource = ["*"]
    },
    {
      Sid      = "Agent"
      Effect   = "Allow"
      Action   = ["ssm:UpdateInstanceInformation"]
      Resource = ["*"]
    },
  ]

  statements = concat(
    [for statement in local.store_statements : statement if local.in_s3],
    local.data_statements,
    local.kms_statements,
    local.group_statements,
    [for statement in local.drive_store_statements : statement if local.in_s3 && var.unattended],
    [for statement in local.drive_statements : statement if var.unattended],
    [for statement in local.session_statements : statement if var.ssh == "session_manager"],
  )
}

resource "aws_iam_role" "node" {
  count = local.own_role ? 1 : 0

  name                 = local.role
  description          = "Machines of ${var.name} in ${var.region}"
  permissions_boundary = var.machine.permissions_boundary
  tags                 = local.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ec2.${data.aws_partition.this.dns_suffix}" }
    }]
  })
}

resource "aws_iam_role_policy" "node" {
  count = local.own_role ? 1 : 0

  name   = "job"
  role   = aws_iam_role.node[0].name
  policy = jsonencode({ Version = "2012-10-17", Statement = local.statements })
}

resource "aws_iam_instance_profile" "node" {
  count = local.own_role ? 1 : 0

  name = local.role
  role = aws_iam_role.node[0].name
  tags = local.tags
}
