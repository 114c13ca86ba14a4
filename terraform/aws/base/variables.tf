# The stack that stands once per region and account. None of these is a secret.

variable "region" {
  description = "The region that it stands in."
  type        = string
}

variable "zones" {
  description = "The region's zones that may be used; each gets a subnet."
  type        = list(string)

  # A zone's letter is the number of its subnet: a zone that comes or goes moves no other zone's addresses.
  validation {
    condition     = length(var.zones) > 0 && alltrue([for zone in var.zones : can(regex("^${var.region}[a-h]$", zone))])
    error_message = "zones are availability zones of the region: its name and a letter from a to h."
  }
}

variable "cidr" {
  description = "The network's private addresses; sixteen subnets are cut from them."
  type        = string
  default     = "10.42.0.0/16"

  validation {
    condition     = try(tonumber(split("/", var.cidr)[1]) >= 16 && tonumber(split("/", var.cidr)[1]) <= 24, false) && can(cidrhost(var.cidr, 0))
    error_message = "cidr is an IPv4 range between /16 and /24, such as 10.42.0.0/16."
  }
}

variable "tags" {
  description = "Owner tags, on every resource from birth, beside gpucloud's own."
  type        = map(string)
  default     = {}
}

variable "private" {
  description = "Whether machines without a public address reach the internet: private subnets and a NAT gateway, which costs money."
  type        = bool
  default     = false
}

variable "nat_zone" {
  description = "The zone of the NAT gateway: that of the machines that need it. Some zones have none."
  type        = string
  default     = null

  validation {
    condition     = var.nat_zone == null || contains(var.zones, coalesce(var.nat_zone, "none"))
    error_message = "nat_zone is one of zones."
  }
}

variable "drill_role" {
  description = "Whether to make the role with which AWS's Fault Injection Service interrupts a machine as a drill."
  type        = bool
  default     = true
}

variable "permissions_boundary" {
  description = "The ARN of the boundary that roles are made under; null for none."
  type        = string
  default     = null
}

variable "alert" {
  description = "An AWS Budget over everything that gpucloud makes: who is told (an e-mail address, an SNS topic's ARN, or both), and the monthly limit in USD."
  type = object({
    email       = optional(string)
    topic       = optional(string)
    monthly_usd = number
  })
  default = null

  validation {
    condition     = var.alert == null || try(length(compact([var.alert.email, var.alert.topic])) > 0, true)
    error_message = "alert names an e-mail address or an SNS topic: somebody must be told."
  }
}
