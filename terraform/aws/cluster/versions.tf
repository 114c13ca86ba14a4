terraform {
  required_version = ">= 1.10" # the lock file beside a state in S3

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "5.100.0" # and no other: .terraform.lock.hcl has its hashes
    }
  }
}

provider "aws" {
  region = var.region
  # Two to three minutes of throttled calls. The default (25) goes on for over 20; less than about 8 gives up in an
  # account where a third of all calls is refused for a minute. No call here starts a machine: none waits for capacity.
  max_retries = 10
}
