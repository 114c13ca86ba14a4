mock_provider "aws" {
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws", dns_suffix = "amazonaws.com" }
  }
  mock_resource "aws_launch_template" {
    defaults = { id = "lt-0123456789abcdef0" }
  }
}

mock_provider "aws" {
  alias = "china"

  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws-cn", dns_suffix = "amazonaws.com.cn" }
  }
}

variables {
  name      = "gpucloud-digits"
  region    = "us-east-1"
  zones     = ["us-east-1a"]
  node_type = "g4dn.xlarge"
  market    = "spot"
  tags      = { project = "vision" }
  access    = { public_key = "ssh-ed25519 AAAA", cidr = "203.0.113.7/32" }
  store     = "s3://bucket/team"
  image     = "ami-0123456789abcdef0"
  user_data = "#!/bin/sh\n"
  network = {
    vpc_id             = "vpc-1"
    subnets            = { us-east-1a = "subnet-a", us-east-1b = "subnet-b" }
    security_group_ids = ["sg-base"]
  }
}

run "a_machine_is_closed_encrypted_and_gone_when_off" {
  command = plan

  assert {
    condition = alltrue([
      one(aws_launch_template.this["0"].metadata_options).http_tokens == "required",
      one(aws_launch_template.this["0"].metadata_options).http_put_response_hop_limit == 1,
      one(aws_launch_template.this["0"].metadata_options).instance_metadata_tags == "enabled",
    ])
    error_message = "IMDSv2 within one hop"
  }
  assert {
    condition = alltrue([
      one(aws_launch_template.this["0"].block_device_mappings).device_name == "/dev/sda1",
      one(one(aws_launch_template.this["0"].block_device_mappings).ebs).encrypted == "true",
      one(one(aws_launch_template.this["0"].block_device_mappings).ebs).volume_type == "gp3",
      one(one(aws_launch_template.this["0"].block_device_mappings).ebs).volume_size == 100,
      one(one(aws_launch_template.this["0"].block_device_mappings).ebs).delete_on_termination == "true",
    ])
    error_message = "an encrypted gp3 disk that goes with its machine"
  }
  assert {
    condition     = aws_launch_template.this["0"].instance_initiated_shutdown_behavior == "terminate" && length(aws_launch_template.this["0"].instance_market_options) == 0 && aws_launch_template.this["0"].instance_type == var.node_type
    error_message = "powered off is ended, and the template names no market"
  }
  assert {
    condition     = join(" ", sort(aws_launch_template.this["0"].tag_specifications[*].resource_type)) == "instance network-interface volume"
    error_message = "all that a launch makes is tagged at birth"
  }
  assert {
    condition     = alltrue([for spec in aws_launch_template.this["0"].tag_specifications : spec.tags == tomap({ project = "vision", "gpucloud:managed" = "true", "gpucloud:cluster" = "gpucloud-digits", "gpucloud:job" = "digits", Name = "gpucloud-digits", "gpucloud:ssh" = "public" })])
    error_message = "with its owner's tags"
  }
}

run "the_group_is_empty_and_leaves_machines_alone" {
  command = plan

  assert {
    condition     = aws_autoscaling_group.this.min_size == 0 && aws_autoscaling_group.this.max_size == 0 && aws_autoscaling_group.this.desired_capacity == 0
    error_message = "of size 0"
  }
  assert {
    condition     = aws_autoscaling_group.this.suspended_processes == toset(["AZRebalance"]) && !aws_autoscaling_group.this.capacity_rebalance && !aws_autoscaling_group.this.protect_from_scale_in && !aws_autoscaling_group.this.force_delete
    error_message = "no machine is moved, protected or lost"
  }
  assert {
    condition     = one([for tag in aws_autoscaling_group.this.tag : tag.value if tag.key == "gpucloud:subnets"]) == "us-east-1a=subnet-a,us-east-1b=subnet-b"
    error_message = "the adapter reads its subnets from a tag"
  }
  assert {
    condition     = !anytrue(aws_autoscaling_group.this.tag[*].propagate_at_launch)
    error_message = "machines get their tags from the template"
  }
  assert {
    condition     = length(aws_autoscaling_group.this.mixed_instances_policy) == 0 && length(aws_autoscaling_group.this.launch_template) == 1
    error_message = "a plain group: with a mixed policy a changed market replaces machines that train"
  }
}

run "ssh_comes_from_the_caller_only" {
  command = plan

  assert {
    condition     = aws_vpc_security_group_ingress_rule.ssh[0].cidr_ipv4 == "203.0.113.7/32" && aws_vpc_security_group_ingress_rule.ssh[0].from_port == 22 && aws_vpc_security_group_ingress_rule.ssh[0].to_port == 22
    error_message = "port 22 from one address"
  }
  assert {
    condition     = length(aws_vpc_security_group_egress_rule.internet) == 0
    error_message = "the way out is the network's own group"
  }
}

run "ssh_from_everywhere_is_refused" {
  command = plan

  variables {
    access = { public_key = "ssh-ed25519 AAAA", cidr = "0.0.0.0/0" }
  }

  expect_failures = [var.access]
}

run "ssh_from_half_of_everywhere_is_refused" {
  command = plan

  variables {
    access = { public_key = "ssh-ed25519 AAAA", cidr = "128.0.0.0/1" }
  }

  expect_failures = [var.access]
}

run "session_manager_opens_no_port_and_needs_no_address" {
  command = plan

  variables {
    ssh    = "session_manager"
    access = { public_key = "ssh-ed25519 AAAA", cidr = "" }
  }

  assert {
    condition     = length(aws_vpc_security_group_ingress_rule.ssh) == 0
    error_message = "no way in"
  }
  assert {
    condition = toset(flatten([for statement in jsondecode(aws_iam_role_policy.node[0].policy).Statement : statement.Action if contains(["Agent", "Channels"], statement.Sid)])) == toset([
      "ssm:UpdateInstanceInformation", "ssmmessages:CreateControlChannel", "ssmmessages:CreateDataChannel",
      "ssmmessages:OpenControlChannel", "ssmmessages:OpenDataChannel",
    ])
    error_message = "the role lets the machine register and be reached, and read no parameter"
  }
}

run "a_network_without_a_group_gets_the_way_out_here" {
  command = plan

  variables {
    network = { vpc_id = "vpc-1", subnets = { us-east-1a = "subnet-a" } }
  }

  assert {
    condition     = length(aws_vpc_security_group_egress_rule.internet) == 1
    error_message = "egress"
  }
  assert {
    condition = alltrue([for text in [
      aws_security_group.this.description,
      aws_vpc_security_group_ingress_rule.ssh[0].description,
      aws_vpc_security_group_ingress_rule.peers.description,
      aws_vpc_security_group_egress_rule.peers.description,
      aws_vpc_security_group_egress_rule.internet[0].description,
    ] : can(regex("^[A-Za-z0-9 ._:/()#,@+=&;{}!$*-]+$", text))])
    error_message = "AWS takes no other characters in a description, an apostrophe least of all"
  }
}

run "without_efa_one_plain_interface" {
  command = plan

  assert {
    condition     = join(" ", keys(aws_launch_template.this)) == "0" && length(aws_launch_template.this["0"].network_interfaces) == 1 && length(aws_placement_group.this) == 0
    error_message = "one template, one interface, no placement group"
  }
  assert {
    condition     = aws_launch_template.this["0"].network_interfaces[0].interface_type == null && aws_launch_template.this["0"].network_interfaces[0].associate_public_ip_address == "true"
    error_message = "with a public address"
  }
}

run "one_efa_interface_keeps_its_public_address" {
  command = apply

  variables {
    efa = [{ interfaces = 0 }, { interfaces = 1 }]
  }

  assert {
    condition     = join(" ", keys(output.launch_templates)) == "0 1" && aws_launch_template.this["1"].name == "gpucloud-digits-efa1"
    error_message = "one template a layout of interfaces"
  }
  assert {
    condition     = aws_launch_template.this["1"].network_interfaces[0].interface_type == "efa" && aws_launch_template.this["1"].network_interfaces[0].associate_public_ip_address == "true"
    error_message = "EFA with an address"
  }
  assert {
    condition     = one(aws_launch_template.this["1"].placement).group_name == "gpucloud-digits" && length(aws_launch_template.this["0"].placement) == 0
    error_message = "close together where there is EFA"
  }
}

run "four_and_thirty_two_cards" {
  command = plan

  variables {
    efa     = [{ interfaces = 4, cards = 4 }, { interfaces = 32, cards = 32 }]
    network = { vpc_id = "vpc-1", subnets = { us-east-1a = "subnet-a" }, public_address = false }
  }

  assert {
    condition     = aws_launch_template.this["4"].network_interfaces[*].network_card_index == tolist([0, 0, 1, 2, 3]) && aws_launch_template.this["4"].network_interfaces[*].device_index == tolist([0, 1, 0, 0, 0])
    error_message = "one EFA interface a card, and a plain one on the first"
  }
  assert {
    condition     = aws_launch_template.this["4"].network_interfaces[*].interface_type == tolist([null, "efa-only", "efa-only", "efa-only", "efa-only"])
    error_message = "the first carries the address"
  }
  assert {
    condition     = length(aws_launch_template.this["32"].network_interfaces) == 33 && alltrue([for nic in aws_launch_template.this["32"].network_interfaces : nic.associate_public_ip_address == null])
    error_message = "and AWS is not even told about public ones"
  }
}

run "sixteen_efa_cards_are_not_sixteen_of_seventeen" {
  command = plan

  variables {
    efa     = [{ interfaces = 16, cards = 16 }, { interfaces = 16, cards = 17 }]
    network = { vpc_id = "vpc-1", subnets = { us-east-1a = "subnet-a" }, public_address = false }
  }

  assert {
    condition     = aws_launch_template.this["16"].name == "gpucloud-digits-efa16" && aws_launch_template.this["16of17"].name == "gpucloud-digits-efa16of17"
    error_message = "p5en and p6-b300 have a template each"
  }
  assert {
    condition     = aws_launch_template.this["16of17"].network_interfaces[*].network_card_index == tolist(range(17)) && alltrue([for nic in aws_launch_template.this["16of17"].network_interfaces : nic.device_index == 0])
    error_message = "p6-b300's first card carries the address and no EFA"
  }
  assert {
    condition     = one([for nic in aws_launch_template.this["16of17"].network_interfaces : nic if nic.network_card_index == 0]).interface_type == null && aws_launch_template.this["16"].network_interfaces[*].device_index == tolist(concat([0, 1], [for card in range(1, 16) : 0]))
    error_message = "p5en's first card carries both"
  }
}

run "machines_say_how_ssh_reaches_them" {
  command = plan

  variables {
    ssh = "session_manager"
  }

  assert {
    condition     = one([for one in aws_launch_template.this["0"].tag_specifications : one.tags["gpucloud:ssh"] if one.resource_type == "instance"]) == "session_manager"
    error_message = "the adapter reads it from the machine"
  }
}

run "several_efa_interfaces_with_a_public_address_are_refused" {
  command = plan

  variables {
    efa = [{ interfaces = 0 }, { interfaces = 4, cards = 4 }]
  }

  expect_failures = [var.network]
}

run "the_role_reaches_its_own_job" {
  command = plan

  assert {
    condition = { for statement in jsondecode(aws_iam_role_policy.node[0].policy).Statement : statement.Sid => statement.Resource } == {
      ListJob  = ["arn:aws:s3:::bucket"]
      ReadJob  = ["arn:aws:s3:::bucket/team/jobs/digits/*"]
      WriteJob = [for name in ["checkpoints", "outputs", "status"] : "arn:aws:s3:::bucket/team/jobs/digits/${name}/*"]
      Prune    = ["arn:aws:s3:::bucket/team/jobs/digits/checkpoints/*"]
      HostKey  = ["arn:aws:s3:::bucket/team/clusters/gpucloud-digits/hosts/$${aws:userid}"]
      Record   = ["arn:aws:s3:::bucket/team/clusters/gpucloud-digits/gpucloud-*.zip", "arn:aws:s3:::bucket/team/clusters/gpucloud-digits/node.json"]
      Level    = ["arn:aws:autoscaling:us-east-1:123456789012:autoScalingGroup:*:autoScalingGroupName/gpucloud-digits"]
    }
    error_message = "and nothing else"
  }
  assert {
    condition     = { for statement in jsondecode(aws_iam_role_policy.node[0].policy).Statement : statement.Sid => statement.Action }.HostKey == ["s3:PutObject"]
    error_message = "a host key is written only"
  }
  assert {
    condition     = jsondecode(aws_iam_role_policy.node[0].policy).Statement[0].Condition == { StringLike = { "s3:prefix" = ["team/jobs/digits/*"] } }
    error_message = "and other jobs' names are not listed"
  }
  assert {
    condition     = aws_iam_role.node[0].name == "gpucloud-digits-us-east-1"
    error_message = "one role a cluster and region"
  }
}

run "of_a_job_that_drives_itself_a_machine_sees_its_group_and_replaces_a_machine_of_it" {
  command = plan

  variables {
    unattended = true
  }

  assert {
    condition = { for statement in jsondecode(aws_iam_role_policy.node[0].policy).Statement : statement.Sid => statement.Resource if contains(["Order", "Look", "Replace"], statement.Sid) } == {
      Order   = ["arn:aws:s3:::bucket/team/clusters/gpucloud-digits/drive.json", "arn:aws:s3:::bucket/team/clusters/gpucloud-digits/hosts/*"]
      Look    = ["*"]
      Replace = ["arn:aws:autoscaling:us-east-1:123456789012:autoScalingGroup:*:autoScalingGroupName/gpucloud-digits"]
    }
    error_message = "its order, its peers' host keys, its own group"
  }
  assert {
    condition = { for statement in jsondecode(aws_iam_role_policy.node[0].policy).Statement : statement.Sid => statement.Condition if contains(["Look", "Replace"], statement.Sid) } == {
      Look    = { StringEquals = { "aws:RequestedRegion" = ["us-east-1"] } }
      Replace = { StringEquals = { "aws:ResourceTag/gpucloud:cluster" = ["gpucloud-digits"] } }
    }
    error_message = "in its region, and with its tag"
  }
  assert {
    condition = toset(flatten([for statement in jsondecode(aws_iam_role_policy.node[0].policy).Statement : statement.Action])) == toset([
      "s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload",
      "autoscaling:SetDesiredCapacity", "autoscaling:TerminateInstanceInAutoScalingGroup",
      "autoscaling:DescribeAutoScalingGroups", "autoscaling:DescribeScalingActivities", "autoscaling:DescribeScheduledActions",
      "ec2:DescribeInstances", "ec2:DescribeSpotPriceHistory",
    ])
    error_message = "no machine more, no shut-off later, no tag, nothing outside the group"
  }
}

run "the_role_reads_the_jobs_data_and_no_neighbour_of_it" {
  command = plan

  variables {
    data = ["s3://sets/imagenet", "s3://whole"]
  }

  assert {
    condition = { for statement in jsondecode(aws_iam_role_policy.node[0].policy).Statement : statement.Sid => statement.Resource }.Data == [
      "arn:aws:s3:::sets/imagenet", "arn:aws:s3:::sets/imagenet/*", "arn:aws:s3:::whole/*"
    ]
    error_message = "a prefix is an object or a folder"
  }
  assert {
    condition     = { for statement in jsondecode(aws_iam_role_policy.node[0].policy).Statement : statement.Sid => statement.Action }.Data == ["s3:GetObject"]
    error_message = "data is read only"
  }
}

run "data_is_never_a_pattern" {
  command = plan

  variables {
    data = ["s3://sets/*"]
  }

  expect_failures = [var.data]
}

run "a_store_without_prefix_begins_at_the_bucket" {
  command = plan

  variables {
    store = "s3://bucket"
  }

  assert {
    condition     = jsondecode(aws_iam_role_policy.node[0].policy).Statement[1].Resource == ["arn:aws:s3:::bucket/jobs/digits/*"]
    error_message = "no empty prefix"
  }
}

run "a_boundary_and_a_key_are_honoured" {
  command = plan

  variables {
    machine = { kms_key = "0a1b", permissions_boundary = "arn:aws:iam::123456789012:policy/limit", disk_gib = 500, root_device = "/dev/xvda" }
  }

  assert {
    condition     = aws_iam_role.node[0].permissions_boundary == "arn:aws:iam::123456789012:policy/limit"
    error_message = "the boundary"
  }
  assert {
    condition = jsondecode(aws_iam_role_policy.node[0].policy).Statement[6] == {
      Sid       = "StoreKey"
      Effect    = "Allow"
      Action    = ["kms:Decrypt", "kms:GenerateDataKey"]
      Resource  = ["arn:aws:kms:us-east-1:123456789012:key/0a1b"]
      Condition = { StringLike = { "kms:ViaService" = ["s3.us-east-1.amazonaws.com"] } }
    }
    error_message = "the key, by way of S3 only"
  }
  assert {
    condition     = one(one(aws_launch_template.this["0"].block_device_mappings).ebs).kms_key_id == "arn:aws:kms:us-east-1:123456789012:key/0a1b" && one(aws_launch_template.this["0"].block_device_mappings).device_name == "/dev/xvda"
    error_message = "the disk"
  }
}

run "a_multi_region_key_opens_a_store_in_another_region" {
  command = plan

  variables {
    machine = { kms_key = "mrk-1", root_device = "/dev/xvda" }
  }

  assert {
    condition     = jsondecode(aws_iam_role_policy.node[0].policy).Statement[6].Resource == ["arn:aws:kms:*:123456789012:key/mrk-1"]
    error_message = "the store's key, wherever the store is"
  }
  assert {
    condition     = jsondecode(aws_iam_role_policy.node[0].policy).Statement[6].Condition == { StringLike = { "kms:ViaService" = ["s3.*.amazonaws.com"] } }
    error_message = "by way of S3 only"
  }
  assert {
    condition     = one(one(aws_launch_template.this["0"].block_device_mappings).ebs).kms_key_id == "arn:aws:kms:us-east-1:123456789012:key/mrk-1"
    error_message = "the disk's key is the one here"
  }
}

run "an_alias_is_no_key" {
  command = plan

  variables {
    machine = { kms_key = "alias/mine" }
  }

  expect_failures = [var.machine]
}

run "with_the_users_own_profile_no_role_is_made" {
  command = apply

  variables {
    ssh     = "session_manager"
    machine = { instance_profile = "company" }
  }

  assert {
    condition     = length(aws_iam_role.node) + length(aws_iam_role_policy.node) + length(aws_iam_instance_profile.node) == 0
    error_message = "nothing of IAM"
  }
  assert {
    condition     = one(aws_launch_template.this["0"].iam_instance_profile).name == "company" && output.role_id == null
    error_message = "the user's own"
  }
}

run "china_has_its_own_names" {
  command   = plan
  providers = { aws = aws.china }

  variables {
    region  = "cn-north-1"
    zones   = ["cn-north-1a"]
    ssh     = "session_manager"
    machine = { kms_key = "0a1b" }
    network = { vpc_id = "vpc-1", subnets = { cn-north-1a = "subnet-a" } }
  }

  assert {
    condition     = strcontains(aws_iam_role.node[0].assume_role_policy, "\"ec2.amazonaws.com.cn\"")
    error_message = "the principal"
  }
  assert {
    condition     = !strcontains(aws_iam_role_policy.node[0].policy, "arn:aws:") && strcontains(aws_iam_role_policy.node[0].policy, "arn:aws-cn:s3:::bucket/team/jobs/digits/*")
    error_message = "the partition"
  }
  assert {
    condition     = strcontains(aws_iam_role_policy.node[0].policy, "s3.cn-north-1.amazonaws.com.cn")
    error_message = "the services"
  }
}

run "a_tag_that_metadata_cannot_hold_keeps_tags_out_of_it" {
  command = plan

  variables {
    tags = { "cost center" = "7" }
  }

  assert {
    condition     = one(aws_launch_template.this["0"].metadata_options).instance_metadata_tags == "disabled"
    error_message = "else AWS starts no machine"
  }
}

run "a_name_too_long_for_a_role_is_refused" {
  command = plan

  variables {
    name = "gpucloud-${join("", [for i in range(47) : "x"])}"
  }

  expect_failures = [var.name]
}

run "a_zone_without_a_subnet_is_refused" {
  command = plan

  variables {
    zones = ["us-east-1c"]
  }

  expect_failures = [var.zones]
}
