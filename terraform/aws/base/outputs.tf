output "vpc_id" {
  description = "The network."
  value       = aws_vpc.this.id
}

output "subnets" {
  description = "Zone to subnet whose machines may have a public address."
  value       = { for zone, subnet in aws_subnet.public : zone => subnet.id }
}

output "private_subnets" {
  description = "Zone to subnet whose machines reach the internet through the NAT gateway; empty without one."
  value       = { for zone, subnet in aws_subnet.private : zone => subnet.id }
}

output "security_group_id" {
  description = "Every machine's way out. Nothing comes in by it: what may come in is each cluster's own group's matter."
  value       = aws_security_group.nodes.id
}

output "drill_role_arn" {
  description = "The role for drills; null without one."
  value       = one(aws_iam_role.drill[*].arn)
}

output "monthly_costs" {
  description = "What the stack costs in 730 hours while it stands, in USD as text, at us-east-1's prices of 2026-11."
  value = var.private ? [
    { what = "NAT gateway in ${local.nat_zone}, and 0.045 USD per GB through it", usd = "32.85" },
    { what = "public address of the NAT gateway", usd = "3.65" },
  ] : []
}
