# One launch template per layout of EFA interfaces. Machines are started by what the adapter makes of it for each type
# and market, and pins by its version: see gpucloud/adapters/aws/nodes/launching.py.

locals {
  # All interfaces must carry the groups, and EFA passes only between machines of one group that refers to itself.
  security_groups = concat([aws_security_group.this.id], var.network.security_group_ids)

  # As gpucloud's adapter tells them apart: 0, 1, 16, and 16of17 where the first card carries no EFA (p6-b300).
  layouts = {
    for one in var.efa :
    one.interfaces > 0 && one.interfaces < one.cards ? "${one.interfaces}of${one.cards}" : tostring(one.interfaces) => one
  }

  # AWS's advice for machines with several cards: the address on a plain interface of card 0, EFA alone beside it where
  # that card has it, and on the other cards as their first device. EFA alone uses no address of the subnet.
  interfaces = {
    for key, one in local.layouts : key => concat(
      [{
        card   = 0
        device = 0
        type   = one.interfaces == 1 && one.cards == 1 ? "efa" : null
        public = one.interfaces > 0 && one.cards > 1 ? null : tostring(var.network.public_address) # with several, AWS refuses even a `false`
      }],
      [
        for card in range(one.cards - one.interfaces, one.cards) : {
          card   = card
          device = card == 0 ? 1 : 0
          type   = "efa-only"
          public = null
        } if one.cards > 1
      ],
    )
  }

  # AWS starts no machine that has a tag in its metadata whose key holds a space or a slash.
  tags_in_metadata = alltrue([for key in keys(local.tags) : can(regex("^[A-Za-z0-9+=.,_:@-]+$", key))])
}

resource "aws_launch_template" "this" {
  for_each = local.interfaces

  name                   = "${var.name}-efa${each.key}"
  update_default_version = true
  image_id               = var.image
  key_name               = aws_key_pair.this.key_name
  user_data              = base64encode(var.user_data)
  tags                   = local.tags

  # A group is not made without a type; the adapter names the one that is started.
  instance_type = var.node_type

  instance_initiated_shutdown_behavior = "terminate" # what is powered off must not go on costing

  iam_instance_profile {
    name = local.profile # by name, so that it is not waited for: template and profile take 5 s each
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
    instance_metadata_tags      = local.tags_in_metadata ? "enabled" : "disabled"
  }

  block_device_mappings {
    device_name = var.machine.root_device

    ebs {
      volume_type           = "gp3"
      volume_size           = var.machine.disk_gib
      encrypted             = true
      kms_key_id            = local.kms_key
      delete_on_termination = true
    }
  }

  dynamic "network_interfaces" {
    for_each = each.value

    content {
      network_card_index          = network_interfaces.value.card
      device_index                = network_interfaces.value.device
      interface_type              = network_interfaces.value.type
      associate_public_ip_address = network_interfaces.value.public
      security_groups             = local.security_groups
      delete_on_termination       = true
    }
  }

  dynamic "placement" {
    for_each = local.layouts[each.key].interfaces > 0 ? aws_placement_group.this : []

    content {
      group_name = placement.value.name
    }
  }

  dynamic "instance_market_options" {
    for_each = var.machine.capacity_block == null ? [] : ["capacity-block"]

    content {
      market_type = instance_market_options.value
    }
  }

  dynamic "capacity_reservation_specification" {
    for_each = compact([var.machine.capacity_reservation, var.machine.capacity_block])

    content {
      capacity_reservation_target {
        capacity_reservation_id = capacity_reservation_specification.value
      }
    }
  }

  # Not `spot-instances-request`: machines on demand stem from it too, and AWS refuses that tag for them.
  dynamic "tag_specifications" {
    for_each = toset(["instance", "volume", "network-interface"])

    content {
      resource_type = tag_specifications.value
      tags          = merge(local.tags, { Name = var.name, "gpucloud:ssh" = var.ssh })
    }
  }

  lifecycle {
    ignore_changes = [instance_type]
  }
}
