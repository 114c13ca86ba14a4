# Every cloud's module returns these two.

output "group_name" {
  description = "The node group that the adapter resizes: <region>/<name>."
  value       = "${var.region}/${aws_autoscaling_group.this.name}"
}

output "store" {
  description = "Where state, logs and checkpoints are kept."
  value       = var.store
}

output "launch_templates" {
  description = "Layout of EFA interfaces to launch template."
  value       = { for layout, template in aws_launch_template.this : layout => template.id }
}

output "role_id" {
  description = "The role's unique id, under which machines publish their host keys; null with the user's own profile."
  value       = one(aws_iam_role.node[*].unique_id)
}

output "security_group_id" {
  description = "The cluster's security group: machine to machine, and SSH from the caller."
  value       = aws_security_group.this.id
}
