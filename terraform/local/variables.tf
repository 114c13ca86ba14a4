# Every cloud's module takes these variables. None of them is a secret.

variable "name" {
  description = "The cluster's name, unique within the store."
  type        = string
}

variable "region" {
  description = "Where the machines stand."
  type        = string
}

variable "zones" {
  description = "The region's zones that may be used."
  type        = list(string)
}

variable "node_type" {
  description = "The instance type."
  type        = string
}

variable "market" {
  description = "How machines are paid: spot or on_demand."
  type        = string

  validation {
    condition     = contains(["spot", "on_demand"], var.market)
    error_message = "The market is spot or on_demand."
  }
}

variable "tags" {
  description = "Owner tags, on every resource from birth."
  type        = map(string)
}

variable "access" {
  description = "Who may log in: the OpenSSH public key, and the addresses it may come from."
  type = object({
    public_key = string
    cidr       = string
  })
}

variable "store" {
  description = "Where state, logs and checkpoints are kept."
  type        = string
}

variable "unattended" {
  description = "Whether the machines drive their job themselves."
  type        = bool
  default     = false
}
