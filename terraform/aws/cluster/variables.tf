# Every cloud's module takes these first ones. None of them is a secret.

variable "name" {
  description = "The cluster's name, unique within the store: gpucloud-<job>."
  type        = string

  # 64 characters are the most that a role's name may have, and it ends in the region.
  validation {
    condition     = can(regex("^gpucloud-[a-z0-9][a-z0-9-]*$", var.name)) && length("${var.name}-${var.region}") <= 64
    error_message = "name is gpucloud-<job> in lower-case letters, digits and hyphens, at most 64 characters with -<region>."
  }
}

variable "region" {
  description = "Where the machines stand."
  type        = string
}

variable "zones" {
  description = "The region's zones that may be used."
  type        = list(string)

  validation {
    condition     = length(setsubtract(var.zones, keys(var.network.subnets))) == 0
    error_message = "each zone needs a subnet in network.subnets."
  }
}

variable "node_type" {
  description = "The instance type that the group is made with; the adapter chooses it anew at every resize."
  type        = string
}

variable "market" {
  description = "How machines are paid: spot or on_demand. The group is made without; the adapter chooses it at every resize."
  type        = string

  validation {
    condition     = contains(["spot", "on_demand"], var.market)
    error_message = "The market is spot or on_demand."
  }
}

variable "tags" {
  description = "Owner tags, on every resource from birth, beside gpucloud's own."
  type        = map(string)
}

variable "access" {
  description = "Who may log in: the OpenSSH public key, and the addresses it may come from."
  type = object({
    public_key = string
    cidr       = string
  })

  validation {
    condition = (
      var.ssh == "session_manager" ||
      can(regex("^[0-9.]+/([89]|[12][0-9]|3[0-2])$", var.access.cidr)) && can(cidrhost(var.access.cidr, 0))
    )
    error_message = "access.cidr is the caller's own IPv4 addresses, such as 203.0.113.7/32; wider than /8 is refused."
  }
}

variable "store" {
  description = "Where state, logs and checkpoints are kept: s3://bucket or s3://bucket/prefix."
  type        = string
}

variable "unattended" {
  description = "Whether the machines drive their job themselves: they may then see their own group and replace a machine of it."
  type        = bool
  default     = false
}

# From here on AWS's own.

variable "data" {
  description = "What machines may read beside the store: s3://bucket or s3://bucket/prefix."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for source in var.data : can(regex("^s3://[a-z0-9.-]+(/[^*?]*)?$", source))])
    error_message = "Each must be s3://bucket or s3://bucket/prefix, without * and ?."
  }
}

variable "image" {
  description = "The machine image (ami-…) that the job is pinned to in this region."
  type        = string
}

variable "user_data" {
  description = "The first-boot script, as plain text. It can be read by every process on the machine."
  type        = string
}

variable "efa" {
  description = "How EFA interfaces lie on the network cards of the job's types, one a card at the most; each layout gets a launch template <name>-efa<N>."
  type = list(object({
    interfaces = number
    cards      = optional(number, 1)
  }))
  default = [{ interfaces = 0 }]

  validation {
    condition     = length(var.efa) > 0 && alltrue([for one in var.efa : one.interfaces >= 0 && one.interfaces <= one.cards && one.interfaces == floor(one.interfaces)])
    error_message = "efa names at least one layout, with as many cards as interfaces at least; 0 interfaces are a type without EFA."
  }
}

variable "network" {
  description = "Where machines are plugged in. `security_group_ids` come beside the cluster's own; without any, that one is the way out too."
  type = object({
    vpc_id             = string
    subnets            = map(string)
    security_group_ids = optional(list(string), [])
    public_address     = optional(bool, true)
  })

  # AWS gives an address to a machine's only interface, never to the first of several.
  validation {
    condition     = !var.network.public_address || alltrue([for one in var.efa : one.interfaces == 0 || one.cards == 1])
    error_message = "machines with several EFA interfaces get no public address: use private subnets and public_address = false."
  }
}

variable "machine" {
  description = "The machine: its disk, the KMS key of disk and store, the user's own profile, a boundary for the role, capacity paid before."
  type = object({
    disk_gib             = optional(number, 100)
    root_device          = optional(string, "/dev/sda1") # of the image; another name would add a disk beside the root
    kms_key              = optional(string)
    instance_profile     = optional(string)
    permissions_boundary = optional(string)
    capacity_reservation = optional(string)
    capacity_block       = optional(string)
  })
  default = {}

  validation {
    condition     = var.machine.kms_key == null || can(regex("^(arn:.*:key/)?[A-Za-z0-9-]+$", var.machine.kms_key))
    error_message = "kms_key is a key's id or ARN: a policy cannot name an alias."
  }

  validation {
    condition     = var.machine.capacity_reservation == null || var.machine.capacity_block == null
    error_message = "machines come from a capacity reservation or from a Capacity Block, not from both."
  }
}

variable "ssh" {
  description = "How SSH gets in: public or private (port 22 from access.cidr), or session_manager (no way in at all)."
  type        = string
  default     = "public"

  validation {
    condition     = contains(["public", "private", "session_manager"], var.ssh)
    error_message = "ssh is public, private or session_manager."
  }
}
