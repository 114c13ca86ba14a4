# Every cloud's module returns these.

output "group_name" {
  description = "The node group that the adapter resizes."
  value       = var.name
  depends_on  = [terraform_data.settings]
}

output "store" {
  description = "Where state, logs and checkpoints are kept."
  value       = var.store
}
