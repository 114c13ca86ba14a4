# In a file, and so a state, of its own: what a group was made with is never changed afterwards.

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

run "a_capacity_block_is_a_market_of_the_template" {
  command = plan

  variables {
    node_type = "p5.48xlarge"
    efa       = [{ interfaces = 32, cards = 32 }]
    network   = { vpc_id = "vpc-1", subnets = { us-east-1a = "subnet-a" }, public_address = false }
    machine   = { capacity_block = "cr-0123456789abcdef0" }
  }

  assert {
    condition     = one(aws_launch_template.this["32"].instance_market_options).market_type == "capacity-block" && aws_launch_template.this["32"].instance_type == "p5.48xlarge"
    error_message = "named in the template"
  }
  assert {
    condition     = one(one(aws_launch_template.this["32"].capacity_reservation_specification).capacity_reservation_target).capacity_reservation_id == "cr-0123456789abcdef0"
    error_message = "with its id"
  }
  assert {
    condition     = length(aws_autoscaling_group.this.mixed_instances_policy) == 0 && length(aws_autoscaling_group.this.launch_template) == 1 && length(aws_placement_group.this) == 0
    error_message = "in a plain group that stands where the block stands"
  }
}

run "a_reservation_is_aimed_at" {
  command = plan

  variables {
    market  = "on_demand"
    machine = { capacity_reservation = "cr-0123456789abcdef0" }
  }

  assert {
    condition     = one(one(aws_launch_template.this["0"].capacity_reservation_specification).capacity_reservation_target).capacity_reservation_id == "cr-0123456789abcdef0" && length(aws_launch_template.this["0"].instance_market_options) == 0
    error_message = "on demand, in the reservation"
  }
}
