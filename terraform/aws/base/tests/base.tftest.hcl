mock_provider "aws" {
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws", dns_suffix = "amazonaws.com" }
  }
  mock_resource "aws_iam_role" {
    defaults = { arn = "arn:aws:iam::123456789012:role/gpucloud-base.drill-us-east-1" }
  }
}

variables {
  region = "us-east-1"
  zones  = ["us-east-1a", "us-east-1d"]
  tags   = { team = "vision" }
}

run "one_public_subnet_a_zone_and_nothing_that_costs" {
  command = apply

  assert {
    condition     = { for zone, subnet in aws_subnet.public : zone => subnet.cidr_block } == { us-east-1a = "10.42.0.0/20", us-east-1d = "10.42.48.0/20" }
    error_message = "a zone's letter is the number of its subnet"
  }
  assert {
    condition     = join(" ", keys(output.subnets)) == "us-east-1a us-east-1d" && length(output.private_subnets) + length(output.monthly_costs) == 0
    error_message = "two public subnets and no more"
  }
  assert {
    condition     = length(aws_nat_gateway.this) == 0 && length(aws_eip.nat) == 0 && length(aws_budgets_budget.this) == 0
    error_message = "nothing is made that was not asked for"
  }
  assert {
    condition     = aws_vpc.this.tags == tomap({ team = "vision", "gpucloud:managed" = "true", "gpucloud:base" = "us-east-1", Name = "gpucloud-us-east-1" })
    error_message = "owner tags from birth"
  }
}

run "a_new_zone_moves_no_other_zone" {
  command = plan

  variables {
    zones = ["us-east-1d", "us-east-1b", "us-east-1a"]
  }

  assert {
    condition     = aws_subnet.public["us-east-1a"].cidr_block == "10.42.0.0/20" && aws_subnet.public["us-east-1d"].cidr_block == "10.42.48.0/20"
    error_message = "the addresses of a and d stay"
  }
}

run "nothing_comes_in" {
  command = plan

  assert {
    condition     = aws_vpc_security_group_egress_rule.internet.cidr_ipv4 == "0.0.0.0/0"
    error_message = "the way out is open"
  }
  assert {
    condition     = alltrue([for text in [aws_security_group.nodes.description, aws_vpc_security_group_egress_rule.internet.description] : can(regex("^[A-Za-z0-9 ._:/()#,@+=&;{}!$*-]+$", text))])
    error_message = "AWS takes no other characters in a description, an apostrophe least of all"
  }
}

run "private_machines_get_a_gateway_and_its_price" {
  command = apply

  variables {
    private = true
  }

  assert {
    condition     = aws_subnet.private["us-east-1d"].cidr_block == "10.42.176.0/20" && join(" ", keys(output.private_subnets)) == "us-east-1a us-east-1d"
    error_message = "one private subnet a zone"
  }
  assert {
    condition     = length(aws_nat_gateway.this) == 1 && length(aws_vpc_endpoint.s3.route_table_ids) == 2
    error_message = "one gateway, and S3 beside it"
  }
  assert {
    condition     = join(" ", output.monthly_costs[*].usd) == "32.85 3.65"
    error_message = "what it costs is told"
  }
}

run "the_gateway_stands_where_its_machines_do" {
  command = apply

  variables {
    private  = true
    nat_zone = "us-east-1d"
  }

  assert {
    condition     = aws_nat_gateway.this[0].subnet_id == aws_subnet.public["us-east-1d"].id
    error_message = "not in the first zone by name, which may have none"
  }
}

run "a_gateway_in_a_zone_without_subnet_is_refused" {
  command = plan

  variables {
    private  = true
    nat_zone = "us-east-1b"
  }

  expect_failures = [var.nat_zone]
}

run "drills_reach_machines_of_gpucloud_only" {
  command = plan

  assert {
    condition = jsondecode(aws_iam_role_policy.drill[0].policy).Statement[0] == {
      Sid       = "Interrupt"
      Effect    = "Allow"
      Action    = "ec2:SendSpotInstanceInterruptions"
      Resource  = "arn:aws:ec2:us-east-1:123456789012:instance/*"
      Condition = { StringEquals = { "aws:ResourceTag/gpucloud:managed" = "true" } }
    }
    error_message = "tagged machines of this account and region"
  }
  assert {
    condition     = aws_iam_role.drill[0].name == "gpucloud-base.drill-us-east-1" && strcontains(aws_iam_role.drill[0].assume_role_policy, "123456789012")
    error_message = "for this account's experiments only"
  }
}

run "the_drills_role_stands_under_the_boundary" {
  command = plan

  variables {
    permissions_boundary = "arn:aws:iam::123456789012:policy/gpucloud-boundary"
  }

  assert {
    condition     = aws_iam_role.drill[0].permissions_boundary == "arn:aws:iam::123456789012:policy/gpucloud-boundary"
    error_message = "as every role that is made"
  }
}

run "no_drill_role_unless_wanted" {
  command = apply

  variables {
    drill_role = false
  }

  assert {
    condition     = output.drill_role_arn == null
    error_message = "no role"
  }
}

run "an_alert_counts_what_is_tagged_and_warns_in_time" {
  command = plan

  variables {
    alert = { email = "who@example.com", monthly_usd = 250 }
  }

  assert {
    condition     = aws_budgets_budget.this[0].limit_amount == "250.00" && join(" ", one(aws_budgets_budget.this[0].cost_filter).values) == "user:gpucloud:managed$true"
    error_message = "the limit and the tag"
  }
  assert {
    condition     = join(", ", sort([for one in aws_budgets_budget.this[0].notification : "${one.notification_type} ${one.threshold}"])) == "ACTUAL 100, ACTUAL 50, ACTUAL 80, FORECASTED 100"
    error_message = "at 50, 80 and 100 %, and when 100 % are foreseen"
  }
  assert {
    condition     = alltrue([for one in aws_budgets_budget.this[0].notification : one.subscriber_email_addresses == toset(["who@example.com"]) && length(one.subscriber_sns_topic_arns) == 0])
    error_message = "by e-mail alone"
  }
}

run "an_alert_may_go_to_a_topic" {
  command = plan

  variables {
    alert = { topic = "arn:aws:sns:us-east-1:123456789012:money", monthly_usd = 20 }
  }

  assert {
    condition     = alltrue([for one in aws_budgets_budget.this[0].notification : one.subscriber_sns_topic_arns == toset(["arn:aws:sns:us-east-1:123456789012:money"]) && length(one.subscriber_email_addresses) == 0])
    error_message = "to the topic alone"
  }
}

run "an_alert_that_nobody_hears_is_refused" {
  command = plan

  variables {
    alert = { monthly_usd = 20 }
  }

  expect_failures = [var.alert]
}

run "a_zone_of_another_region_is_refused" {
  command = plan

  variables {
    zones = ["us-west-2a"]
  }

  expect_failures = [var.zones]
}

run "a_local_zone_is_refused" {
  command = plan

  variables {
    zones = ["us-east-1-bos-1a"]
  }

  expect_failures = [var.zones]
}

run "a_network_too_small_is_refused" {
  command = plan

  variables {
    cidr = "10.42.0.0/28"
  }

  expect_failures = [var.cidr]
}
