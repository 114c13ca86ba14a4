# One job's cluster: everything that costs nothing, and an Auto Scaling group of size 0. Machines are in no state.

data "aws_partition" "this" {}

data "aws_caller_identity" "this" {}

locals {
  job     = trimprefix(var.name, "gpucloud-")
  account = data.aws_caller_identity.this.account_id
  arn     = "arn:${data.aws_partition.this.partition}"
  tags = merge(var.tags, {
    "gpucloud:managed" = "true"
    "gpucloud:cluster" = var.name
    "gpucloud:job"     = local.job
  })

  # Capacity that is paid before stands where it stands: AWS starts none of it in a placement group made afterwards.
  reserved = var.machine.capacity_reservation != null || var.machine.capacity_block != null
  grouped  = max(var.efa[*].interfaces...) > 0 && !local.reserved
}

resource "aws_key_pair" "this" {
  key_name   = var.name
  public_key = var.access.public_key
  tags       = local.tags
}

resource "aws_placement_group" "this" {
  count = local.grouped ? 1 : 0

  name     = var.name
  strategy = "cluster"
  tags     = local.tags
}

resource "aws_autoscaling_group" "this" {
  name                      = var.name
  min_size                  = 0
  max_size                  = 0
  desired_capacity          = 0
  vpc_zone_identifier       = local.grouped ? [try(var.network.subnets[var.zones[0]], values(var.network.subnets)[0])] : values(var.network.subnets) # a placement group is of one zone
  wait_for_capacity_timeout = "0"
  suspended_processes       = ["AZRebalance"] # it would end a machine that trains in order to even out zones
  capacity_rebalance        = false           # the same upon a mere hint of risk
  termination_policies      = ["NewestInstance"]
  health_check_type         = "EC2"
  health_check_grace_period = 600   # longer than the reboot that a new driver needs
  protect_from_scale_in     = false # a protected machine would outlive the shut-off
  force_delete              = false # a group that still has machines must not vanish unseen

  # Pinned by number, and plain: a mixed policy would have machines replaced that train when their market is changed, and
  # `$Latest` starts by a version that nobody was asked about.
  launch_template {
    id      = aws_launch_template.this[sort(keys(local.layouts))[0]].id
    version = tostring(aws_launch_template.this[sort(keys(local.layouts))[0]].latest_version)
  }

  # The group's own tags only: machines get theirs from the template. `gpucloud:subnets` is where the adapter reads
  # which subnet stands for which zone.
  dynamic "tag" {
    for_each = merge(local.tags, {
      "gpucloud:subnets" = join(",", [for zone, subnet in var.network.subnets : "${zone}=${subnet}"])
    })

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = false
    }
  }

  # The template names the profile only, and no machine may start before its role may do what it has to.
  depends_on = [aws_iam_instance_profile.node, aws_iam_role_policy.node]

  lifecycle {
    # These are the adapter's, who changes them at every attempt. Its schedules are in no state at all.
    ignore_changes = [
      min_size,
      max_size,
      desired_capacity,
      vpc_zone_identifier,
      launch_template,
      suspended_processes,
    ]
  }
}
