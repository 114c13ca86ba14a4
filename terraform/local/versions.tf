# The built-in provider (terraform_data) only: nothing is downloaded, and `terraform init` is not needed.
terraform {
  required_version = ">= 1.5"
}
