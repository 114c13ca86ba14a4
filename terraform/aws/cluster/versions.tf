terraform {
  required_version = ">= 1.10" # the lock file beside a state in S3

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.100, < 6.0"
    }
  }
}

provider "aws" {
  region      = var.region
  max_retries = 2 # the default repeats a capacity error for over 20 minutes
}
