# The embedded cloud. Its half that makes what costs nothing: a node group of size 0.
#
# Terraform runs the same function that is called directly where Terraform is absent. GPUCLOUD_PYTHON, GPUCLOUD_HOME
# and PYTHONPATH come from the environment.

locals {
  # No firewall stands before this machine's own addresses: of `access`, the key is all that is needed.
  cluster = {
    name      = var.name
    region    = var.region
    zones     = var.zones
    node_type = var.node_type
    market    = var.market
    tags      = var.tags
    access    = var.access.public_key
    store     = var.store

    unattended = var.unattended
  }
}

# Recorded before the group is made and removed after it, so that even a group that was made halfway is destroyed.
# It is never replaced: a change of the cluster's settings changes its input, and no node is touched.
resource "terraform_data" "group" {
  input = local.cluster

  provisioner "local-exec" {
    when        = destroy
    command     = "exec \"$GPUCLOUD_PYTHON\" -m gpucloud.adapters.local.provision destroy"
    environment = { GPUCLOUD_CLUSTER = jsonencode(self.input) }
    quiet       = true
  }
}

# Replaced whenever a setting changes, which only repeats `ensure`: making what exists succeeds.
resource "terraform_data" "settings" {
  triggers_replace = local.cluster
  depends_on       = [terraform_data.group]

  provisioner "local-exec" {
    command     = "exec \"$GPUCLOUD_PYTHON\" -m gpucloud.adapters.local.provision ensure"
    environment = { GPUCLOUD_CLUSTER = jsonencode(local.cluster) }
    quiet       = true
  }
}
